"""One round of OpenVINO GenAI, in its own environment: one JSON object per line."""

import argparse
import json
import os
import pathlib
import time

import numpy
import openvino
import openvino_genai

import moments


def properties():
    """Properties of the CPU plugin: bf16 arithmetic if it supports it, and all threads."""
    has_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    asked = {"INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0))}
    return {**asked, "INFERENCE_PRECISION_HINT": "bf16"} if has_bf16 else asked


def precision(model):
    """The precision that these properties result in."""
    core = openvino.Core()
    compiled = core.compile_model(str(pathlib.Path(model) / "openvino_model.xml"), "CPU", properties())
    arithmetic, kv = (compiled.get_property(name) for name in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"))
    return f"{arithmetic.get_type_name()} arithmetic, {kv.get_type_name()} K/V"


def pipeline(model):
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 512
    scheduler.max_num_seqs = 64
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    return openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties())


def generation(num_tokens):
    """Greedy, with exactly this many tokens."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = num_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def run(pipe, rng, concurrency, num_input, num_output):
    """The arrival times of each request's tokens, in seconds from the start."""
    prompts = [rng.integers(300, 1000, (1, num_input)).astype(numpy.int64) for _ in range(concurrency)]
    start = time.perf_counter()
    handles = [
        pipe.add_request(i, openvino.Tensor(prompt), generation(num_output)) for i, prompt in enumerate(prompts)
    ]
    came = [[] for _ in handles]
    while pipe.has_non_finished_requests():
        pipe.step()
        now = time.perf_counter() - start
        for request, handle in zip(came, handles):
            while handle.can_read():
                for output in handle.read().values():
                    request += [now] * len(output.generated_ids)
    return came


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--describe", action="store_true")
    parser.add_argument("--loads", type=moments.loads, default={})
    options = parser.parse_args()
    if options.describe:
        print(json.dumps({"precision": precision(options.model)}))
        return
    pipe = pipeline(options.model)
    rng = numpy.random.default_rng(0)
    # One-time work is not measured.
    for load in options.loads.values():
        run(pipe, rng, *moments.small(load))
    for name, load in options.loads.items():
        print(json.dumps({"load": name, "rate": moments.rate(load[1], run(pipe, rng, *load))}), flush=True)


if __name__ == "__main__":
    main()
