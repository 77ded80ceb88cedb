"""The kernels of attention on a GPU, without the library: their times beside PyTorch's attention, and whether two
builds compute the same bits.

    python benches/drivers/gpu_attention.py target/kernels [OTHER]

Needs a GPU of compute capability 9.0, and PyTorch. `target/kernels` is what `cargo xtask kernels` writes, OTHER such a
folder of other sources, whose AttentionCall and shared memory must be the same. Prints a line of JSON for each shape:
microseconds of a call, the median of 5 rounds, the bits of OTHER compared, and the largest difference to PyTorch's
results.
"""

import ctypes
import dataclasses
import json
import pathlib
import struct
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from gpu_operations import ATTENTION, microseconds

NUM_Q_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 32, 8, 32
GROUP = NUM_Q_HEADS // NUM_KV_HEADS
SPLIT_LEN = 256
NUM_CALLS = 20
# DeepSeek-V3: 128 heads in groups of 16, elements of a key and of a value.
LATENT_GROUPS, LATENT_GROUP, KEY_DIM, VALUE_DIM = 8, 16, 576, 512
LOG2_E = 1.44269504

driver = ctypes.CDLL("libcuda.so.1")


def check(code):
    if code != 0:
        sys.exit(f"CUDA error {code}")


class Kernels:
    """The images of a folder."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.functions = {}

    def function(self, file, name, shared_bytes):
        if name not in self.functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            check(driver.cuModuleLoadData(ctypes.byref(module), (self.folder / f"{file}.sm_90.cubin").read_bytes()))
            check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
            max_dynamic_shared_size_bytes = 8
            check(driver.cuFuncSetAttribute(function, max_dynamic_shared_size_bytes, shared_bytes))
            self.functions[name] = function
        return self.functions[name]

    def num_busy_blocks(self, file, name, shared_bytes, num_threads):
        """Blocks that the GPU holds at a time."""
        of_multiprocessor = ctypes.c_int()
        function = self.function(file, name, shared_bytes)
        check(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(of_multiprocessor), function, num_threads, ctypes.c_size_t(shared_bytes)
            )
        )
        return of_multiprocessor.value * torch.cuda.get_device_properties(0).multi_processor_count

    def launch(self, file, name, grid, num_threads, shared_bytes, argument):
        function = self.function(file, name, shared_bytes)
        buffer = ctypes.create_string_buffer(argument, len(argument))
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(buffer, ctypes.c_void_p))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        check(driver.cuLaunchKernel(function, *grid, num_threads, 1, 1, shared_bytes, stream, arguments, None))


@dataclasses.dataclass
class Cache:
    """Keys and values of sequences of one length, in blocks in no order."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: tuple
    table: torch.Tensor

    @classmethod
    def random(cls, num_sequences, length, dtype, *shape):
        num_blocks = num_sequences * -(-length // BLOCK_SIZE)
        table = torch.randperm(num_blocks, device="cuda").int()
        shape = (num_blocks, *shape)
        if dtype == "bf16":
            return cls(*(torch.randn(shape, device="cuda").bfloat16() for _ in range(2)), (None, None), table)
        codes = (torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8) for _ in range(2))
        scales = (torch.rand(shape[:-1], device="cuda") * 0.02 + 0.005 for _ in range(2))
        return cls(*codes, tuple(scales), table)


def address(tensor):
    return 0 if tensor is None else tensor.data_ptr()


def call(out, partials, q, cache, tiles, counts, scale, num_groups, group, head_dim, key_dim=0):
    """AttentionCall of kernels/paged_attention.cuh."""
    tensors = (out, partials, q, None, cache.keys, cache.values, *cache.scales, cache.table, tiles, counts, None)
    shift = (BLOCK_SIZE - 1).bit_length()
    multiplier = -(-(2**31 << shift) // BLOCK_SIZE)
    numbers = (scale * LOG2_E, num_groups, group, head_dim, BLOCK_SIZE, multiplier, shift, 0, 0, 0.0, 0.0, key_dim)
    return struct.pack("<12Q", *map(address, tensors)) + struct.pack("<f4i2I2i2fiQ", *numbers, 0)


def tiles_of(entries):
    """Entries of AttentionTile: first_row, num_rows, first_query, position, block_table, split, first_partial,
    table_stride."""
    packed = bytearray(b"".join(struct.pack("<8I", *entry) for entry in entries))
    return torch.frombuffer(packed, dtype=torch.uint8).cuda()


def context_tiles(num_rows, position, group, num_queries):
    num_tiles = -(-num_rows * group // num_queries)
    return [(0, num_rows, index * num_queries, position, 0, 0, 0, 1) for index in reversed(range(num_tiles))]


def generation_tiles(num_sequences, length, group):
    num_blocks, num_splits = -(-length // BLOCK_SIZE), -(-length // SPLIT_LEN)
    return [
        (row, 1, 0, length - 1, row * num_blocks, split, row * num_splits * group, 1)
        for split in range(num_splits)
        for row in range(num_sequences)
    ]


def counts_of(entries, num_sequences):
    return torch.tensor([len(entries), num_sequences], dtype=torch.int32, device="cuda")


def partials_of(num_sequences, length, num_heads, head_dim):
    width = (head_dim + 9) // 8 * 8
    return torch.empty(num_sequences * -(-length // SPLIT_LEN) * num_heads * width, device="cuda")


@dataclasses.dataclass
class Generation:
    """A kernel of generation, with the merge of splits behind it."""

    file: str
    name: str
    num_threads: int
    shared_bytes: int
    num_groups: int
    group: int

    def launch(self, kernels, num_entries, num_sequences, length, argument):
        num_blocks = kernels.num_busy_blocks(self.file, self.name, self.shared_bytes, self.num_threads) // self.num_groups
        grid = (min(num_entries, num_blocks), self.num_groups, 1)
        kernels.launch(self.file, self.name, grid, self.num_threads, self.shared_bytes, argument)
        if length > SPLIT_LEN:
            grid = (num_sequences, self.num_groups, self.group)
            kernels.launch("paged_attention_merge", "paged_attention_merge", grid, 128, 0, argument)


def compare(what, builds, out, run, operations, bytes_read, reference=None):
    """Times `run(kernels)` of each build, which writes `out`."""
    figures, results = {"what": what}, []
    for kernels in builds:
        out.zero_()
        figures[str(kernels.folder)] = microseconds(lambda _: run(kernels), NUM_CALLS)
        results.append(out.clone())
    figures["TFLOP/s"] = round(operations / figures[str(builds[0].folder)] / 1e6, 1)
    figures["GB/s"] = round(bytes_read / figures[str(builds[0].folder)] / 1e3)
    if len(results) > 1:
        figures["same bits"] = torch.equal(results[0].view(torch.int16), results[1].view(torch.int16))
    if reference is not None:
        for name, backend in ATTENTION.items():
            with sdpa_kernel(backend):
                figures[name] = microseconds(lambda _: reference(), NUM_CALLS)
                difference = (reference()[0].transpose(0, 1).float() - results[0].float()).abs().max()
                figures[f"difference to {name}"] = round(difference.item(), 5)
    print(json.dumps(figures), flush=True)


def context(builds, dtype, head_dim, num_rows, position):
    length = num_rows + position
    cache = Cache.random(1, length, dtype, NUM_KV_HEADS, BLOCK_SIZE, head_dim)
    q = torch.randn(num_rows, NUM_Q_HEADS, head_dim, device="cuda").bfloat16()
    out = torch.zeros_like(q)
    entries = context_tiles(num_rows, position, GROUP, 64)
    tiles, counts = tiles_of(entries), counts_of(entries, 1)
    argument = call(out, None, q, cache, tiles, counts, head_dim**-0.5, NUM_KV_HEADS, GROUP, head_dim)
    of_queries = 128 * head_dim if head_dim > 128 else 0
    shared_bytes = 512 * head_dim + 2048 + of_queries + (0 if dtype == "bf16" else 512)
    name, grid = f"paged_attention_context_{dtype}_d{head_dim}", (len(entries), NUM_KV_HEADS, 1)
    seen = num_rows * position + num_rows * (num_rows + 1) // 2
    reference = None
    if dtype == "bf16" and position == 0:
        order = cache.table.long()
        keys, values = (
            tensor[order].transpose(0, 1).reshape(1, NUM_KV_HEADS, -1, head_dim)[:, :, :length].contiguous()
            for tensor in (cache.keys, cache.values)
        )
        queries = q.transpose(0, 1)[None].contiguous()

        def reference():
            return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)

    compare(
        f"context, {dtype}, heads of {head_dim}, {num_rows} rows behind {position}",
        builds,
        out,
        lambda kernels: kernels.launch("paged_attention_context", name, grid, 128, shared_bytes, argument),
        4 * head_dim * NUM_Q_HEADS * seen,
        0,
        reference,
    )


def generation(builds, dtype, head_dim, num_sequences, length):
    cache = Cache.random(num_sequences, length, dtype, NUM_KV_HEADS, BLOCK_SIZE, head_dim)
    q = torch.randn(num_sequences, NUM_Q_HEADS, head_dim, device="cuda").bfloat16()
    out, partials = torch.zeros_like(q), partials_of(num_sequences, length, NUM_Q_HEADS, head_dim)
    entries = generation_tiles(num_sequences, length, GROUP)
    tiles, counts = tiles_of(entries), counts_of(entries, num_sequences)
    argument = call(out, partials, q, cache, tiles, counts, head_dim**-0.5, NUM_KV_HEADS, GROUP, head_dim)
    tile_bytes = 256 * head_dim if dtype == "bf16" or head_dim > 128 else 128 * head_dim
    shared_bytes = tile_bytes + (8192 if head_dim > 128 else 0) + (0 if dtype == "bf16" else 512)
    file = "paged_attention_generation"
    kernel = Generation(file, f"{file}_{dtype}_d{head_dim}", 32, shared_bytes, NUM_KV_HEADS, GROUP)
    element_bytes = 2 if dtype == "bf16" else 1
    compare(
        f"generation, {dtype}, heads of {head_dim}, {num_sequences} sequences of {length}",
        builds,
        out,
        lambda kernels: kernel.launch(kernels, len(entries), num_sequences, length, argument),
        4 * head_dim * NUM_Q_HEADS * num_sequences * length,
        2 * head_dim * NUM_KV_HEADS * num_sequences * length * element_bytes,
    )


def latent(builds, num_sequences, length, num_rows):
    """Generation of one row each, or the context of one sequence."""
    cache = Cache.random(num_sequences, length, "bf16", BLOCK_SIZE, KEY_DIM)
    is_context = num_rows > num_sequences
    q = torch.randn(num_rows, LATENT_GROUPS, LATENT_GROUP, KEY_DIM, device="cuda").bfloat16()
    out = torch.zeros(num_rows, LATENT_GROUPS, LATENT_GROUP, VALUE_DIM, device="cuda", dtype=torch.bfloat16)
    partials = partials_of(num_sequences, length, LATENT_GROUPS * LATENT_GROUP, VALUE_DIM)
    if is_context:
        entries = context_tiles(num_rows, length - num_rows, LATENT_GROUP, 32)
    else:
        entries = generation_tiles(num_sequences, length, LATENT_GROUP)
    tiles, counts = tiles_of(entries), counts_of(entries, num_sequences)
    scale = 192**-0.5
    argument = call(out, partials, q, cache, tiles, counts, scale, LATENT_GROUPS, LATENT_GROUP, VALUE_DIM, KEY_DIM)
    file = "latent_attention"
    kernel = Generation(file, "latent_attention_generation", 128, 81920, LATENT_GROUPS, LATENT_GROUP)

    def run(kernels):
        if is_context:
            grid = (len(entries), LATENT_GROUPS, 1)
            kernels.launch(file, "latent_attention_context", grid, 256, 159744, argument)
        else:
            kernel.launch(kernels, len(entries), num_sequences, length, argument)

    seen = num_rows * (num_rows + 1) // 2 if is_context else num_sequences * length
    compare(
        f"latent attention, {'a prompt' if is_context else f'{num_sequences} sequences'} of {length}",
        builds,
        out,
        run,
        2 * (KEY_DIM + VALUE_DIM) * LATENT_GROUPS * LATENT_GROUP * seen,
        0 if is_context else 2 * KEY_DIM * seen,
    )


def main():
    # The driver's functions use PyTorch's context.
    torch.zeros(1, device="cuda")
    torch.manual_seed(1)
    builds = [Kernels(folder) for folder in sys.argv[1:3]]
    if not builds:
        sys.exit(__doc__)
    print(json.dumps({"GPU": torch.cuda.get_device_name(0), "PyTorch": torch.__version__}), flush=True)
    for head_dim in (64, 96, 128, 256):
        for dtype in ("bf16", "int8"):
            for num_rows, position in ((1024, 0), (8192, 0), (512, 3584)):
                context(builds, dtype, head_dim, num_rows, position)
            for num_sequences, length in ((256, 1024), (32, 1024), (1, 8192)):
                generation(builds, dtype, head_dim, num_sequences, length)
    for num_sequences, length, num_rows in ((1, 1024, 1), (32, 1024, 32), (128, 1024, 128), (1, 1024, 1024)):
        latent(builds, num_sequences, length, num_rows)


if __name__ == "__main__":
    main()
