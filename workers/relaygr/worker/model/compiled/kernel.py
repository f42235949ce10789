"""The machine code of `attention.py`: `work` calls `scores` and `values` for each unit of keys and block of rows.

The sums of an innermost loop are in registers: `Block` says how many rows, keys and columns that is. Each step reads
numbers, and multiplies copies of them by vectors: of rows for scores, of columns of V for values. In bfloat16 it makes
half as many steps, each with two dimensions or two keys (`pairs.py`), and K and V of a unit are converted once for all
blocks.

Each step also fetches a share of what comes next: the next 16 keys into the first-level cache, the next unit into the
second. Without, 16 rows take three times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from llvmlite import ir

from relaygr.worker.model.compiled.emit import (
    F32,
    I8,
    I32,
    I64,
    TO_FIRST,
    Code,
    Int,
    Memory,
    vector_of,
    zeros,
)
from relaygr.worker.model.compiled.form import FACTORS, INTS, LANES, POINTERS, Arguments, Block, Form
from relaygr.worker.model.compiled.pairs import BFLOAT16, conversion, dot, paired
from relaygr.worker.model.compiled.silu import short_silu, silu

_NO_ROW = 2**31 - 1
"""The first row that sees a key which is none."""


def kernel(form: Form, blocks: Sequence[Block]) -> str:
    """The function `work(arguments, number, threads)` and what it calls, in LLVM's language."""
    module = ir.Module()
    _Work(module, form, blocks).write()
    # Without the header, which names no processor.
    return "\n".join(str(function) for function in module.functions)


class _Scores:
    """`scores(q, k, weights, next_k, keys, seen)`: the weights of a unit's keys for one block of rows.

        for 16 keys of `keys`:
            for the keys of each tile:
                for d in range(attention_dim):
                    for key: sum[key] += K[key, d] * q[d]                # q[d]: a vector of the block's rows
            for key: weights[key] = SiLU(sum[key]) where the row sees the key, else 0

    Row i of the block sees the first `seen` + i keys. The last 16 may contain keys that are none.
    """

    def __init__(self, module: ir.Module, form: Form, block: Block) -> None:
        self._form, self._block = form, block
        self._code = code = Code(module, f"scores{block.rows}", pointers=4, ints=2)
        self._q, self._k, self._weights, self._next_k = code.pointers
        self._keys, self._seen = code.ints

    def write(self) -> ir.Function:
        self._code.loop(0, self._keys, LANES, self._sixteen_keys)
        return self._code.end()

    def _sixteen_keys(self, key: Int) -> None:
        code, block, form = self._code, self._block, self._form
        scores = self._weights.at(key * block.rows)
        first = 0
        for count in block.key_tiles:
            self._tile(key, first, count, scores)
            first += count
        # Pairs take half of the room of their scores, so none overwrites a score that is still needed.
        results = self._weights.at(key * block.rows // form.per_lane)

        def activate(place: Int) -> None:
            weights = [
                self._weight(key + place + number, scores.at((place + number) * block.rows))
                for number in range(form.per_lane)
            ]
            result = paired(code, *weights) if form.bfloat16 else weights[0]
            results.at(place * block.rows // form.per_lane).store(result, align=64)

        code.loop(0, LANES, form.per_lane, activate)

    def _tile(self, key: Int, first: int, count: int, scores: Memory) -> None:
        """Scores of `count` of the 16 keys from `key` on, the first of them number `first`."""
        code, block, form = self._code, self._block, self._form
        multiply = dot if form.bfloat16 else Code.fma
        g, keys_at = form.geometry, self._k.at(key * form.k_lanes)
        next_keys = code.either(key + LANES < self._keys, keys_at.at(LANES * g.attention_dim), self._next_k)

        def step(d: Int, *sums: ir.Value) -> list[ir.Value]:
            row = self._q.at(d * block.rows).load_vector(block.rows, align=64)
            # Each tile fetches as many keys as it multiplies.
            number = d * (count * form.per_lane) + first * g.attention_dim
            # Converted keys are in the cache.
            if not form.bfloat16:
                code.fetch(next_keys.at(number), TO_FIRST)
            line = (number + key * g.attention_dim) // LANES
            for more in range(-(-count * form.per_lane // LANES)):
                code.fetch_evenly(self._next_k, line + more, form.unit * g.attention_dim // LANES)
            numbers = (keys_at.at(d + index * form.k_lanes).load() for index in range(first, first + count))
            return [
                multiply(code, code.spread(number, block.rows), row, total)
                for number, total in zip(numbers, sums, strict=True)
            ]

        for index, total in enumerate(code.loop(0, form.k_lanes, 1, step, *[zeros(block.rows)] * count), first):
            scores.at(index * block.rows).store(total, align=64)

    def _weight(self, key: Int, score: Memory) -> ir.Value:
        """The weights of one key, of its scores."""
        code, rows = self._code, self._block.rows
        b = code.builder
        x = score.load_vector(rows, align=64)
        result = (short_silu if self._form.bfloat16 else silu)(code, x)
        first_row = b.select(key < self._keys, (key + 1 - self._seen).low_bits(), I32(_NO_ROW))
        numbers = ir.Constant(vector_of(rows, I32), list(range(rows)))
        sees = b.icmp_signed(">=", numbers, code.spread(first_row, rows))
        return b.select(sees, result, zeros(rows))


class _Values:
    """`values(sums, v, weights, next_v, steps)`: adds the weighted rows of V, or pairs of rows, to a block's sums.

        for the rows and columns of each tile:
            for key in range(steps):
                for row: sum[row] += weights[key, row] * V[key]          # V[key]: vectors of columns
            sums += sum

    Reads exactly `steps` rows of V: those behind may hold anything, even NaN. The sums of a unit are added to those
    before it, which keeps them exact.
    """

    def __init__(self, module: ir.Module, form: Form, block: Block) -> None:
        self._form, self._block = form, block
        self._code = code = Code(module, f"values{block.rows}", pointers=4, ints=1)
        self._sums, self._v, self._weights, self._next_v = code.pointers
        (self._steps,) = code.ints

    def write(self) -> ir.Function:
        """A tile is some rows and up to `Block.column_vectors` vectors of columns. Each fetches a share of `next_v`."""
        vectors = self._form.geometry.hidden_dim // LANES
        count = -(-vectors // self._block.column_vectors)
        lines_before = 0
        for first, last in pairwise(vectors * number // count for number in range(count + 1)):
            row = 0
            for number, rows in enumerate(self._block.row_tiles):
                share, rest = divmod((last - first) * self._form.per_lane, len(self._block.row_tiles))
                lines = share + (number < rest)
                self._tile(range(row, row + rows), range(first, last), lines_before, lines)
                lines_before += lines
                row += rows
        return self._code.end()

    def _tile(self, rows: range, vectors: range, lines_before: int, lines: int) -> None:
        """Sums of some rows and vectors of columns. Each step fetches `lines` lines, behind those of tiles before."""
        code, form, width = self._code, self._form, self._form.geometry.hidden_dim
        multiply = dot if form.bfloat16 else Code.fma

        def step(key: Int, *sums: ir.Value) -> list[ir.Value]:
            columns = [self._v.at(key * width + vector * LANES).load_vector(LANES) for vector in vectors]
            before, results = iter(sums), []
            for row in rows:
                # Not before the loop: LLVM keeps the order, and there are no registers for the weights of all rows.
                weight = code.spread(self._weights.at(key * self._block.rows + row).load(), LANES)
                results += [multiply(code, weight, column, next(before)) for column in columns]
            line = key * lines + lines_before * (form.unit // form.per_lane)
            for more in range(lines):
                code.fetch_evenly(self._next_v, line + more, form.unit * width // LANES)
            return results

        totals = code.loop(0, self._steps, 1, step, *[zeros(LANES)] * (len(rows) * len(vectors)))
        places = (self._sums.at(row * width + vector * LANES) for row in rows for vector in vectors)
        for place, total in zip(places, totals, strict=True):
            place.store(code.builder.fadd(place.load_vector(LANES), total))


def _place(argument: str) -> int:
    place: int = getattr(Arguments, argument).offset
    return place


class _Work:
    """`work(arguments, number, threads)`: the share of thread `number` of all items, which are heads of parts of keys.

        for item in range(number, parts * num_heads, threads):
            packed_q = alpha * q, by block and dimension
            for unit in the units of the part:                           # 64 keys in one page
                convert(...)                                             # in bfloat16
                for block of rows of which one sees a key of the unit:
                    scores(...)
                    values(...)
            out = scale * sums                                           # if all keys are in one part

    If the keys are in several parts, the caller adds their sums.
    """

    def __init__(self, module: ir.Module, form: Form, blocks: Sequence[Block]) -> None:
        self._form, self._geometry = form, form.geometry
        self._scores = {block: _Scores(module, form, block).write() for block in blocks}
        self._values = {block: _Values(module, form, block).write() for block in blocks}
        self._convert = conversion(module, form.geometry) if form.bfloat16 else None
        self._code = code = Code(module, "work", pointers=1, ints=2)
        given = code.pointers[0].of(I8)
        self._memory = {name: given.at(_place(name)).load_pointer() for name in POINTERS}
        self._int = {name: given.at(_place(name)).load_int() for name in INTS}
        self._factor = {name: given.at(_place(name)).of(F32).load() for name in FACTORS}
        self._runs: list[tuple[Block, Int, Int]] = []
        """Of each kind of blocks: their number, and the row with which they begin."""
        first = Int(code.builder, I64(0))
        for place, block in enumerate(blocks):
            count = given.at(_place("block_counts")).of(I64).at(place).load_int()
            self._runs.append((block, count, first))
            first += count * block.rows
        self._weights = code.room(form.unit * max(block.rows for block in blocks))
        widths = (self._geometry.attention_dim, self._geometry.hidden_dim) if form.bfloat16 else ()
        self._pairs = [code.room(form.unit * width // 2) for width in widths]

    def write(self) -> None:
        code = self._code
        number, threads = code.ints
        items = self._int["parts"] * self._geometry.num_heads
        with code.when(number < items):
            code.loop(number, items, threads, self._item)
        code.end()

    def _item(self, item: Int) -> None:
        code, g, of = self._code, self._geometry, self._int
        head, part = item % g.num_heads, item // g.num_heads
        first, last = part * of["units"] // of["parts"], (part + 1) * of["units"] // of["parts"]
        packed = self._memory["packed_q"].at(item * of["padded"] * g.attention_dim)
        sums = self._memory["sums"].at(item * of["padded"] * g.hidden_dim)
        q = self._memory["q"].at(head * of["q_head"])
        for block, count, row in self._runs:
            with code.when(count > 0):
                code.loop(row, row + count * block.rows, 1, partial(self._pack, q, packed, block))
        code.loop(first, last, 1, partial(self._unit, head, last, packed, sums))
        with code.when(of["parts"] < 2):
            out = self._memory["out"].at(head * of["out_head"])
            code.loop(0, of["rows"], 1, partial(self._write_out, sums, out))

    def _pack(self, q: Memory, packed: Memory, block: Block, row: Int) -> None:
        """alpha * q of a row to its lane of its block, by dimension. Rows that are missing are copies of the last."""
        code, g = self._code, self._geometry
        lane = row % block.rows
        given = q.at(row.at_most(self._int["rows"] - 1) * self._int["q_row"])
        own = packed.at((row - lane) * g.attention_dim + lane)
        together = 4 if g.attention_dim % 4 == 0 else 1

        def dimensions(first: Int) -> None:
            for d in (first + more for more in range(together)):
                number = code.builder.fmul(given.at(d).load(), self._factor["alpha"])
                to = own.at(d // self._form.per_lane * block.rows)
                if self._form.bfloat16:
                    to.of(BFLOAT16).at(d % 2).store(code.builder.fptrunc(number, BFLOAT16), align=2)
                else:
                    to.store(number)

        code.loop(0, g.attention_dim, together, dimensions)

    def _unit(self, head: Int, last: Int, packed: Memory, sums: Memory, unit: Int) -> None:
        """All rows on one unit of keys; the next one is fetched meanwhile."""
        code, form = self._code, self._form
        k, v = self._keys_and_values(head, unit)
        next_k, next_v = self._keys_and_values(head, (unit + 1).at_most(last - 1))
        keys = (self._int["tokens"] - unit * form.unit).at_most(form.unit)
        visible = self._int["visible"] - unit * form.unit
        if self._convert is not None:
            code.call(self._convert, k, v, *self._pairs, keys)
            k, v = self._pairs

        def attend(block: Block, first: Int, number: Int) -> None:
            row = number * block.rows + first
            seen = visible + row
            most = seen + (block.rows - 1)
            with code.when(most > 0):
                seen_keys = most.at_most(keys)
                q = packed.at(row * self._geometry.attention_dim)
                code.call(self._scores[block], q, k, self._weights, next_k, seen_keys, seen)
                steps = (seen_keys + (form.per_lane - 1)) // form.per_lane
                sums_of = sums.at(row * self._geometry.hidden_dim)
                code.call(self._values[block], sums_of, v, self._weights, next_v, steps)

        for block, count, first in self._runs:
            with code.when(count > 0):
                code.loop(0, count, 1, partial(attend, block, first))

    def _keys_and_values(self, head: Int, unit: Int) -> tuple[Memory, Memory]:
        """K and V of one head in a unit: [unit, attention_dim] and [unit, hidden_dim]."""
        g, form = self._geometry, self._form
        in_page = g.page_tokens // form.unit
        page = self._memory["table"].of(I64).at(unit // in_page).load_int()
        layer = self._memory["arena"].at(page * (g.page_bytes // g.dtype.size_bytes))
        place = head * g.page_tokens + unit % in_page * form.unit
        values = layer.at(g.num_heads * g.page_tokens * g.attention_dim)
        return layer.at(place * g.attention_dim), values.at(place * g.hidden_dim)

    def _write_out(self, sums: Memory, out: Memory, row: Int) -> None:
        """One row of one head."""
        code, width = self._code, self._geometry.hidden_dim
        scale = code.spread(self._factor["scale"], LANES)
        for column in range(0, width, LANES):
            total = sums.at(row * width + column).load_vector(LANES)
            out.at(row * self._int["out_row"] + column).store(code.builder.fmul(total, scale))
