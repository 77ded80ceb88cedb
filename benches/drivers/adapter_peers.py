"""Requests with different LoRA adapters: our backend in a real tritonserver beside llama.cpp's server.

Both serve the same checkpoint and the same random adapters. The same number of HTTP clients send greedy requests with
random token ids, each with the adapters in turns, to one server and then to the other. A row has the medians over the
rounds, with as many adapters as it says, 0 for none.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import random
import socket
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request

import numpy
import rows
from engines import setup
from engines.llama_cpp import LlamaCpp
from harness.adapters import write_safetensors
from harness.repository import add_model
from harness.server import Server
from throughput import IDS

TIMEOUT_S = 600


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return json.load(answer)


class Ours:
    """A tritonserver with our backend, which reads the adapters as PEFT saves them."""

    def __init__(self, options, adapters, folder):
        repository = folder / "repository"
        parameters = {"max_seq_len": options.input + options.output, "lora_dir": adapters}
        fields = f"{IDS} max_batch_size: {options.concurrency}"
        add_model(repository, "model", parameters, fields=fields, checkpoint=options.model)
        self.server = Server(repository)

    def complete(self, prompt, num_tokens, adapter):
        options = {} if adapter is None else {"lora_name": str(adapter)}
        url = f"http://{self.server.http_url}/v2/models/model/generate"
        answer = post(url, {"input_ids": prompt, "max_tokens": num_tokens, "ignore_eos": True, **options})
        return answer["sequence_length"] - len(prompt)

    def stop(self):
        self.server.stop()


class LlamaServer:
    """llama.cpp's server. It computes requests with different adapters in different batches."""

    def __init__(self, options, adapters, folder):
        peer = LlamaCpp(options.model, "bf16")
        files = [folder / f"{adapter.name}.gguf" for adapter in sorted(adapters.iterdir())]
        for adapter, file in zip(sorted(adapters.iterdir()), files, strict=True):
            peer.programs.convert_adapter(options.model, adapter, file)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        threads = len(os.sched_getaffinity(0))
        context = options.concurrency * (options.input + options.output)
        command = [peer.programs.folder / "llama-server", "-m", peer.file, "--host", "127.0.0.1", "--port", port]
        command += ["-c", context, "-np", options.concurrency, "-b", 2048, "-ub", 512, "-t", threads, "-tb", threads]
        command += ["--lora", ",".join(map(str, files)), "--lora-init-without-apply", "--no-webui"]
        self.url = f"http://127.0.0.1:{port}"
        self.num_adapters = len(files)
        self.log = (folder / "llama-server.log").open("w+")
        self.process = subprocess.Popen(list(map(str, command)), stdout=self.log, stderr=subprocess.STDOUT)
        self.wait_until_ready()

    def wait_until_ready(self):
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.1)
        self.stop()
        self.log.seek(0)
        raise setup.Unavailable(f"llama-server is not ready: {self.log.read()[-500:]}")

    def complete(self, prompt, num_tokens, adapter):
        # The scale of an adapter that is not named is 0.
        lora = [] if adapter is None else [{"id": adapter, "scale": 1.0}]
        body = {"prompt": prompt, "n_predict": num_tokens, "ignore_eos": True, "temperature": 0, "cache_prompt": False, "lora": lora}
        return post(f"{self.url}/completion", body)["tokens_predicted"]

    def stop(self):
        self.process.terminate()
        self.process.wait(TIMEOUT_S)


def write_adapters(folder, checkpoint, num_adapters, rank):
    """Random adapters of every linear layer, called 0, 1 and so on."""
    config = json.loads((checkpoint / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    modules = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    for index in range(num_adapters):
        rng = numpy.random.default_rng(index)
        tensors = {}
        for layer, (module, (inputs, outputs)) in itertools.product(range(config["num_hidden_layers"]), modules.items()):
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = rng.standard_normal((rank, inputs)) / inputs**0.5
            tensors[f"{name}.lora_B.weight"] = rng.standard_normal((outputs, rank)) / 10
        adapter = folder / str(index)
        adapter.mkdir(parents=True)
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": list(modules)}
        (adapter / "adapter_config.json").write_text(json.dumps(settings))
        write_safetensors(adapter / "adapter_model.safetensors", tensors)


def output_rate(server, options, num_adapters, rng):
    """Output tokens per second of clients that each send one request after the other."""
    lock = threading.Lock()
    num_tokens, failures = 0, []

    def prompt():
        return [rng.randrange(300, 1000) for _ in range(options.input)]

    count = options.concurrency * options.requests
    requests = iter([(prompt(), n % num_adapters if num_adapters else None) for n in range(count)])

    def client():
        nonlocal num_tokens
        try:
            while True:
                with lock:
                    request = next(requests, None)
                if request is None:
                    return
                found = server.complete(request[0], options.output, request[1])
                assert found == options.output, f"{found} tokens"
                with lock:
                    num_tokens += found
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=client) for _ in range(options.concurrency)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return num_tokens / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=lambda text: pathlib.Path(text).resolve(), required=True)
    parser.add_argument("--concurrency", type=int, default=32, help="clients")
    parser.add_argument("--adapters", default="0,1,8,32", help="numbers of adapters")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2, help="requests of each client in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    counts = [int(count) for count in options.adapters.split(",")]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        folder = pathlib.Path(folder)
        write_adapters(folder / "adapters", options.model, max(counts), options.rank)
        running = {}
        for name, kind in [("ours", Ours), ("llama-server", LlamaServer)]:
            running[name] = kind(options, folder / "adapters", folder)
            servers.callback(running[name].stop)
        rng = random.Random(0)
        for server in running.values():
            # One-time work is not measured.
            for adapter in [None, *range(max(counts))]:
                server.complete([rng.randrange(300, 1000) for _ in range(options.input)], 4, adapter)
        for count in counts:
            rates = {name: [] for name in running}
            for _ in range(options.rounds):
                for name, server in running.items():
                    rates[name].append(output_rate(server, options, count, rng))
            ours, peer = (statistics.median(rates[name]) for name in ["ours", "llama-server"])
            row = {
                "adapters": count,
                "rank": options.rank,
                "concurrency": options.concurrency,
                "input": options.input,
                "output": options.output,
                "output_tokens_per_s": round(ours, 1),
                "peer_output_tokens_per_s": round(peer, 1),
                "ratio": round(ours / peer, 2),
                "rounds": options.rounds,
            }
            rows.show(row, options.json)


if __name__ == "__main__":
    main()
