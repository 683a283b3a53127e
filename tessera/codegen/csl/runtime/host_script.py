"""Host script: splits the inputs into pieces, copies them to the PEs, runs the program, copies the results back.

It runs the program in its folder, and needs only NumPy and the vendor's host library. As a script it reads .npy files:

    cs_python run.py --name out [--cmaddr ADDRESS] --input x.npy … --output y.npy …
"""

# ruff: noqa: B905
# The vendor's Python is an old version without zip(strict=...).
import argparse
import json
import pathlib

import numpy as np


def scatter(array, entry, grid, turn=0):
    """The words of every PE, (rows, columns, words): its piece of the array, zero-padded at the edges."""
    array = np.asarray(array)
    elements = np.zeros((grid[0], grid[1], int(np.prod(entry["piece"], dtype=int))), array.dtype)
    for row in range(grid[0]):
        for column in range(grid[1]):
            own, part = _find_overlap(entry, grid, (row, column), turn)
            elements[row, column].reshape(entry["piece"])[own] = array[part]
    if elements.dtype.itemsize >= 4:
        return elements.view(np.uint32)
    narrow = _codes(elements).astype(np.int16) if elements.dtype.itemsize == 1 else elements
    return narrow.view(np.uint16).astype(np.uint32)


def gather(words, entry, grid, array=None, turn=0):
    """The whole array from the words of every PE, which are copied to their pieces of `array`."""
    dtype = _parse_dtype(entry["dtype"])
    elements = words if dtype.itemsize >= 4 else words.astype(np.uint16)
    if dtype.itemsize == 1:
        elements = elements.astype(np.uint8 if _is_coded(dtype) else dtype)
    elements = elements.view(dtype)
    array = np.zeros(entry["shape"], dtype) if array is None else array
    for row in range(grid[0]):
        for column in range(grid[1]):
            own, part = _find_overlap(entry, grid, (row, column), turn)
            array[part] = elements[row, column].reshape(entry["piece"])[own]
    return array


def _parse_dtype(name):
    """An element type of NumPy, or of ml_dtypes where NumPy has none."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def _is_coded(dtype):
    """Whether one-byte elements are stored as codes: floats are; integers and bools are stored as numbers."""
    return dtype.name.startswith("float")


def _codes(elements):
    return elements.view(np.uint8) if _is_coded(elements.dtype) else elements


def _find_starts(entry, grid, place, turn):
    """The first index of a PE's piece along each axis of the array."""
    if "steps" not in entry:
        return [place[s] * n if s >= 0 else 0 for n, s in zip(entry["piece"], entry["split"])]
    number, tiles, coordinates = (turn * grid[0] + place[0]) * grid[1] + place[1], entry["tiles"], []
    for axis in reversed(range(1, len(tiles))):
        number, coordinate = divmod(number, tiles[axis])
        coordinates.insert(0, coordinate)
    coordinates.insert(0, number)
    return [
        first + sum(step * at for step, at in zip(steps, coordinates))
        for first, steps in zip(entry["first"], entry["steps"])
    ]


def _find_overlap(entry, grid, place, turn):
    """The slices of a PE's piece that lie in the array, and of the array that lie in the piece."""
    own, part = [], []
    for start, length, size in zip(_find_starts(entry, grid, place, turn), entry["piece"], entry["shape"]):
        low, high = min(max(start, 0), size), max(min(start + length, size), 0)
        own.append(slice(low - start, max(high, low) - start))
        part.append(slice(low, max(high, low)))
    return tuple(own), tuple(part)


def execute(runner, plan, arrays, narrow, wide, order):
    """The results of the program; `narrow`, `wide` and `order` are constants of the host library for copies.

    A plan of several rounds runs the program once for each, with other pieces of the arrays.
    """
    grid, rounds = tuple(plan["grid"]), plan.get("rounds", 1)
    results = [_make_result(entry, plan, arrays) for entry in plan["outputs"]]
    for turn in range(rounds):
        for entry, array in zip(plan["inputs"], arrays):
            words = scatter(array, entry, grid, turn)
            if not words.size:  # nothing to copy
                continue
            kind = wide if entry["bytes"] >= 4 else narrow
            runner.memcpy_h2d(
                runner.get_id(entry["symbol"]), words.reshape(-1), 0, 0, grid[1], grid[0], words.shape[2],
                streaming=False, data_type=kind, order=order, nonblock=False,
            )  # fmt: skip
        runner.launch("compute", nonblock=False)
        for entry, result in zip(plan["outputs"], results):
            length = int(np.prod(entry["piece"], dtype=int)) * max(1, entry["bytes"] // 4)
            if not length:
                continue
            words = np.zeros(grid[0] * grid[1] * length, np.uint32)
            kind = wide if entry["bytes"] >= 4 else narrow
            runner.memcpy_d2h(
                words, runner.get_id(entry["symbol"]), 0, 0, grid[1], grid[0], length,
                streaming=False, data_type=kind, order=order, nonblock=False,
            )  # fmt: skip
            gather(words.reshape(grid[0], grid[1], length), entry, grid, result, turn)
    return results


def _make_result(entry, plan, arrays):
    """The array for a result: a copy of the input that the program changes in place, or zeros."""
    if "into" in entry:
        return np.array(arrays[plan["given"].index(entry["into"])])
    return np.zeros(entry["shape"], _parse_dtype(entry["dtype"]))


def find_fault(runner, plan, wide, order):
    """The fault number, row and column of the first PE that stored a fault; None without a fault."""
    if not plan.get("faults"):
        return None
    rows, columns = plan["grid"]
    words = np.zeros(rows * columns, np.uint32)
    runner.memcpy_d2h(
        words, runner.get_id("fault"), 0, 0, columns, rows, 1,
        streaming=False, data_type=wide, order=order, nonblock=False,
    )  # fmt: skip
    found = np.flatnonzero(words)
    return (int(words[found[0]]), *(int(n) for n in divmod(found[0], columns))) if len(found) else None


def main():
    """Run the program on the arrays of .npy files."""
    from cerebras.sdk.runtime.sdkruntimepybind import MemcpyDataType, MemcpyOrder, SdkRuntime

    parser = argparse.ArgumentParser()
    parser.add_argument("--name", help="the folder that cslc wrote")
    parser.add_argument("--cmaddr", help="the address of a machine")
    parser.add_argument(
        "--input", action="append", default=[], help="the .npy file of an input; repeat for each input in order"
    )
    parser.add_argument(
        "--output", action="append", default=[], help="the .npy file for a result; repeat for each result in order"
    )
    options = parser.parse_args()
    plan = json.loads((pathlib.Path(__file__).parent / "plan.json").read_text())
    rng = np.random.default_rng(0)
    arrays = [np.load(name) for name in options.input]
    arrays += [rng.standard_normal(e["shape"]).astype(e["dtype"]) for e in plan["inputs"][len(arrays) :]]
    runner = SdkRuntime(options.name, cmaddr=options.cmaddr)
    runner.load()
    runner.run()
    kinds = MemcpyDataType.MEMCPY_16BIT, MemcpyDataType.MEMCPY_32BIT
    results = execute(runner, plan, arrays, *kinds, MemcpyOrder.ROW_MAJOR)
    fault_found = find_fault(runner, plan, kinds[1], MemcpyOrder.ROW_MAJOR)
    runner.stop()
    if fault_found:
        fault = plan["faults"][fault_found[0] - 1]
        place = ":".join(str(n) for n in fault["place"][:2])
        raise SystemExit("{}: {} (row {}, column {})".format(place, fault["text"], fault_found[1], fault_found[2]))
    for name, result in zip(options.output, results):
        np.save(name, result)
    print("done:", ", ".join(f"{e['symbol']} {r.shape}" for e, r in zip(plan["outputs"], results)))


if __name__ == "__main__":
    main()
