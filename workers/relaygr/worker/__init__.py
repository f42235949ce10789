"""The worker: devices, the model, the prefix cache, the executor and the worker process.

Only this package and its users import torch. torch would load its plug-ins too, and a torch_npu without its CANN
libraries makes every `import torch` fail. So this package switches plug-in loading off, unless the user has set the
variable, and `relaygr.worker.device` imports torch_npu when the device is `npu`.

oneDNN compiles a product for each number of rows, and torch keeps it a second time, for each thread. By default both
keep 1024 products of about 0.6 MiB. The memory plan (`memory.py`) counts the products that may be kept here, so no
variable of the user replaces these bounds. They hold from the first product on.
"""

import os
from typing import Final

COMPILED_PRODUCTS: Final = 128
"""The most products of oneDNN that a process keeps."""

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = str(COMPILED_PRODUCTS)
# Keeps no more than one for each thread: what torch finds here, oneDNN would find as well. 0 ends the process.
os.environ["LRU_CACHE_CAPACITY"] = "1"
