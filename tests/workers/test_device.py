"""The device layer: the choice of a device, and that no other module names a kind of device."""

from __future__ import annotations

import errno
import mmap
import os
import platform
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, cast
from unittest.mock import MagicMock

import pytest
import torch

from relaygr.runtime.errors import RelayError
from relaygr.worker.device import AcceleratorDevice, CpuDevice, open_device, set_threads

ROOT = Path(__file__).resolve().parents[2]
LOADS_AN_ENGINE = (
    "import relaygr.worker.model.engine, torch\n"
    "from relaygr.worker.device import open_device\n"
    "print(open_device().name)\n"
)


def run_python(code: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, with `path` searched first."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    environment["PYTHONPATH"] = "" if path is None else str(path)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture
def broken_torch_npu(tmp_path: Path) -> Path:
    """A torch_npu without the CANN libraries: registered as torch's plug-in, and its import fails."""
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('libhccl.so: cannot open shared object file')\n")
    metadata = tmp_path / "torch_npu-2.13.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return tmp_path


def test_no_module_but_the_device_layer_names_a_kind_of_accelerator() -> None:
    forbidden = re.compile(r"\.cuda\(|torch\.cuda|torch\.npu|torch_npu|torch\.accelerator|torch\.Stream|torch\.Event\b")
    found = []
    for package in ("schemas", "streams", "workers", "training", "cli", "benchmarks"):
        for file in (ROOT / package).rglob("*.py"):
            if file.is_relative_to(ROOT / "workers" / "relaygr" / "worker" / "device"):
                continue
            code = re.sub(r'""".*?"""', "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
            found += [
                f"{file.relative_to(ROOT)}: {line.strip()}" for line in code.splitlines() if forbidden.search(line)
            ]
    # The table of extras names the library that an extra installs.
    assert [line for line in found if '"torch_npu": "npu"' not in line] == []


@pytest.mark.slow
def test_loading_an_engine_imports_no_accelerator_s_library() -> None:
    """Triton comes with CUDA builds of torch, and costs a second; a CPU worker, or one on an NPU, never needs it."""
    done = run_python(f"{LOADS_AN_ENGINE}import sys; print(sorted({{'triton', 'torch_npu'}} & set(sys.modules)))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_without_torch_npu_triton_and_cuda_the_cpu_is_the_default_and_the_setting_cuda_is_an_error() -> None:
    hidden = "import os, sys; os.environ['CUDA_VISIBLE_DEVICES'] = ''; "
    hidden += "sys.modules['torch_npu'] = sys.modules['triton'] = None\n"
    done = run_python(f"{hidden}{LOADS_AN_ENGINE}open_device('cuda')")
    assert done.stdout.splitlines()[0] == "cpu", done.stderr
    assert "Device 'cuda' is set" in done.stderr
    assert "no accelerator at all" in done.stderr


@pytest.mark.slow
def test_a_broken_torch_npu_does_not_break_the_cpu_and_its_setting_is_an_error_with_a_remedy(
    broken_torch_npu: Path,
) -> None:
    unguarded = run_python("import torch", broken_torch_npu)
    assert unguarded.returncode != 0, "the trap is not set: torch does not load its plug-ins"
    done = run_python(f"{LOADS_AN_ENGINE}print('loaded')\nopen_device('npu')", broken_torch_npu)
    assert done.stdout.splitlines()[-1] == "loaded", done.stderr
    assert "RelayError" in done.stderr and "libhccl.so" in done.stderr and "extra `npu`" in done.stderr


def test_a_missing_device_is_refused_with_the_present_one() -> None:
    present = torch.accelerator.current_accelerator(check_available=True)
    missing = "xpu" if present is None or present.type != "xpu" else "mps"
    with pytest.raises(RelayError, match=f"Device '{missing}' is set"):
        open_device(missing)


def test_a_name_that_is_no_device_is_refused() -> None:
    with pytest.raises(RelayError, match="'gpu' is not a device; write cpu"):
        open_device("gpu")


def test_the_setting_goes_before_the_accelerator() -> None:
    device = open_device("cpu")
    assert isinstance(device, CpuDevice)
    assert (device.name, device.is_cpu) == ("cpu", True)


def test_work_on_the_cpu_is_done_when_its_call_returns() -> None:
    device = CpuDevice()
    device.bind_thread()
    stream, other = device.stream(), device.stream(low_priority=True)
    with stream.use():
        tensor = device.empty_bytes(4, 8).fill_(3)
    event = stream.record()
    other.wait_for(event)
    assert event.done()
    event.wait()
    device.synchronize()
    assert device.current_stream().record().done()
    assert int(tensor.sum()) == 96
    assert device.empty_host_bytes(2).dtype is torch.uint8
    memory = device.memory()
    assert 0 < memory.free_bytes <= memory.total_bytes


def test_captured_work_on_the_cpu_runs_again_on_the_present_contents_of_its_memory() -> None:
    source, target = torch.ones(3), torch.zeros(3)

    def work() -> None:
        torch.mul(source, 2.0, out=target)

    replay = CpuDevice().recorder().capture(work)
    assert target.tolist() == [2.0, 2.0, 2.0]
    source.fill_(5.0)
    replay.run()
    assert target.tolist() == [10.0, 10.0, 10.0]
    assert CpuDevice().compute_units == 1


@pytest.mark.parametrize(
    ("kind", "module", "expected"),
    [
        ("cuda", MagicMock(is_bf16_supported=lambda including_emulation: including_emulation), False),
        ("cuda", MagicMock(is_bf16_supported=lambda including_emulation: True), True),
        ("npu", MagicMock(is_bf16_supported=lambda: True), True),
        ("npu", SimpleNamespace(), False),
    ],
    ids=["a GPU that emulates it", "a GPU that has it", "an NPU that has it", "an accelerator that does not say"],
)
def test_an_accelerator_with_bfloat16_products_prefers_them(
    monkeypatch: pytest.MonkeyPatch, kind: str, module: object, expected: bool
) -> None:
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    # torch knows the name npu only once torch_npu is imported.
    device = AcceleratorDevice(cast(torch.device, SimpleNamespace(type=kind, index=0)))
    assert device.prefers_bfloat16 is expected
    assert CpuDevice().prefers_bfloat16 is False


class FakeGraph:
    """Records the calls during a capture."""

    events: ClassVar[list[str]] = []
    made = 0

    def __init__(self) -> None:
        FakeGraph.made += 1
        self.number = FakeGraph.made

    def pool(self) -> tuple[int, int]:
        return self._pool

    def capture_begin(self, pool: tuple[int, int] | None, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "other threads go on copying"
        self._pool = (0, self.number) if pool is None else pool
        self.events.append(f"record {self.number}")

    def capture_end(self) -> None:
        self.events.append(f"recorded {self.number} in {self._pool}")

    def replay(self) -> None:
        self.events.append(f"replay {self.number}")


def test_an_accelerator_runs_the_work_once_and_then_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run compiles and is not recorded. The graphs of a recorder share memory, which its first graph holds.

    The graphs of two engines share no memory: one may be tried in another thread while the other serves.
    """
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: MagicMock())
    streams = MagicMock()
    monkeypatch.setattr(torch, "Stream", streams)
    device = AcceleratorDevice(torch.device("cpu"))
    recorder = device.recorder()
    for each in (recorder, recorder, device.recorder()):
        each.capture(lambda: FakeGraph.events.append("work")).run()
    assert FakeGraph.events == [
        *("work", "record 1", "recorded 1 in (0, 1)"),
        *("record 2", "work", "recorded 2 in (0, 1)", "replay 2"),
        *("work", "record 3", "work", "recorded 3 in (0, 1)", "replay 3"),
        *("work", "record 4", "recorded 4 in (0, 4)"),
        *("record 5", "work", "recorded 5 in (0, 4)", "replay 5"),
    ]
    assert streams.call_count == 1, "libraries keep memory for each stream that they have seen"


def test_sent_data_arrives_in_the_given_tensor_or_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator copies from its own pinned memory, so the source may change or be freed at once."""
    asked: list[bool] = []
    empty = torch.empty

    def noted(*args: object, pin_memory: bool = False, **kwargs: object) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(*args, **kwargs)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    accelerator = AcceleratorDevice(torch.device("cpu"))
    for device in (CpuDevice(), accelerator):
        host, into = torch.arange(5), torch.zeros(5, dtype=torch.int64)
        assert device.sent(host).tolist() == [0, 1, 2, 3, 4]
        assert device.sent(host, into) is into
        assert into.tolist() == [0, 1, 2, 3, 4]
    assert asked == [True, False, True]
    apart = accelerator.sent(host)
    host.fill_(7)
    assert apart.tolist() == [0, 1, 2, 3, 4]


def test_after_work_that_raised_the_device_is_waited_for_and_no_second_error_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[object] = []

    def fails(device: object) -> None:
        waited.append(device)
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", fails)
    AcceleratorDevice(torch.device("cpu")).settle()
    assert waited == [torch.device("cpu")]


def test_memory_that_does_not_fit_is_refused_with_its_size() -> None:
    with pytest.raises(RelayError, match=r"MiB do not fit into cpu"):
        CpuDevice().empty_bytes(2**31, 2**31)
    with pytest.raises(RelayError, match=r"^17,592,186,044,416 MiB do not fit into cpu"):
        CpuDevice().empty_bytes(2**32, 2**32)


def test_memory_comes_from_a_system_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_arguments: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert CpuDevice().empty_bytes(2, 2 << 20).fill_(3).eq(3).all()


def test_a_core_file_has_no_arena() -> None:
    """A standby waits for the lock of a process that crashed until its core is written."""
    memory = CpuDevice().empty_bytes(4 << 20)
    smaps = Path("/proc/self/smaps").read_text()
    [of_arena] = [part for part in re.split(r"(?m)^(?=[0-9a-f]+-)", smaps) if _holds(part, memory.data_ptr())]
    assert " dd" in of_arena.partition("VmFlags:")[2]


def _holds(mapping: str, address: int) -> bool:
    start, dash, end = mapping.partition(" ")[0].partition("-")
    return bool(dash) and int(start, 16) <= address < int(end, 16)


def test_fewer_than_one_thread_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        set_threads(0)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives memory back after each forward")
def test_a_forward_of_the_device_thread_finds_the_memory_that_the_one_before_has_freed() -> None:
    """The heap was given back to the system: page faults took 3 of 26 ms of a prefix."""
    code = """
        import resource, threading, torch
        from relaygr.worker.device import CpuDevice

        def run() -> None:
            for faults in (before, after):
                for _ in range(10):
                    [torch.ones(512 << 10, dtype=torch.uint8) for _ in range(40)]
                faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt)

        CpuDevice()
        before, after = [], []
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        print(after[0] - before[0])
    """
    found = run_python(textwrap.dedent(code))
    assert found.returncode == 0, found.stderr
    # It was 7,000 or more.
    assert int(found.stdout) < 1000
