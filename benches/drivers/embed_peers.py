#!/usr/bin/env python3
"""How many texts sentence-transformers on torch, OpenVINO, and Text Embeddings Inference embed in a second on the CPU,
in turns with `inflight-measure embed`.

    pip install torch transformers sentence-transformers openvino
    python benches/drivers/embed_peers.py --make /tmp/minilm       # a model of the shape of all-MiniLM-L6, with random weights
    python benches/drivers/embed_peers.py --model /tmp/minilm --measure target/release/inflight-measure
    python benches/drivers/embed_peers.py --make /tmp/bge --layers 12 --pooling cls     # of the shape of bge-small-en-v1.5

Texts are tokens, so that neither side tokenises. Those of a row have one length, so that nothing is padded; or, with
`--input 16-128`, lengths from 16 to 128, which come in a mixed order: the peers, like sentence-transformers' `encode`,
have all texts at once, sort them by length, and pad a batch to its longest. Of a peer, the fastest of its batch sizes
counts; ours has its own batching, in the order in which texts come. Each round runs all; figures are medians of the
rounds. OpenVINO has the model that sentence-transformers holds, with its pooling, compiled for each shape. It computes
in what it chooses, which the row tells: bf16 where the processor has AMX or AVX-512 BF16, as ours always does; so does
torch in bf16. All sum up in f32.

With `--tei PROGRAM`, Text Embeddings Inference is a peer as well: its `text-embeddings-router`, with as many CPUs as
there are threads. It gets each batch as a request, or all texts in a single one, which it may split. Its time is the
request time that it reports, in whole milliseconds, minus tokenisation. Built with its backend `ort`, as its images for
CPUs are, it gets an ONNX export of the model; `--tei-backend candle` gives it the safetensors file alone. The libraries
that it loads are found by the environment (`ORT_DYLIB_PATH`, `LD_LIBRARY_PATH`).

On a machine that others use, `--cpu-time` with one thread counts the seconds that the processor worked for each side,
not those that passed.
"""

import argparse
import contextlib
import json
import os
import pathlib
import resource
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

import openvino
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", type=pathlib.Path, metavar="DIR", help="write the model and end")
    parser.add_argument("--layers", type=int, default=6, metavar="N", help="of the model that is written")
    parser.add_argument("--pooling", choices=["mean", "cls"], default="mean", help="of the model that is written")
    parser.add_argument("--model", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--measure", type=pathlib.Path, metavar="PROGRAM")
    parser.add_argument("--texts", type=int, default=128, metavar="N")
    parser.add_argument("--input", default="16,128", metavar="TOKENS,...")
    parser.add_argument("--batch-sizes", default="8,32,64", metavar="N,...")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N")
    parser.add_argument("--max-num-tokens", type=int, default=512, metavar="N", help="of a step of ours: by default as in a server")
    parser.add_argument("--instructions", metavar="SET", help="of ours, such as avx512_bf16; by default the best")
    parser.add_argument("--tei", type=pathlib.Path, metavar="PROGRAM", help="text-embeddings-router")
    parser.add_argument("--tei-backend", choices=["ort", "candle"], default="ort", help="that the program is built with")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    options = parser.parse_args()
    if options.make:
        return make(options.make, options.layers, options.pooling)
    if options.tei and options.cpu_time:
        parser.error("--tei: its CPU time is also that of HTTP and of tokenising: without --cpu-time")
    torch.set_num_threads(options.threads)
    torch_models = {dtype: SentenceTransformer(str(options.model), device="cpu", model_kwargs=dict(dtype=getattr(torch, dtype))).eval()
                    for dtype in ["float32", "bfloat16"]}
    vocab_size = torch_models["float32"][0].auto_model.config.vocab_size
    peers = dict(torch_models, openvino=OpenVino(torch_models["float32"], options.threads))
    with Tei(torch_models["float32"], options) if options.tei else contextlib.nullcontext() as tei:
        compare(peers, tei, vocab_size, options)


def compare(peers, tei, vocab_size, options):
    """Prints a row for each kind of texts."""
    sizes = [int(size) for size in options.batch_sizes.split(",")]
    for lengths in options.input.split(","):
        ours, theirs = [], {peer: [] for peer in peers} | ({"tei": []} if tei else {})
        for _ in range(options.rounds):
            ours.append(measure(lengths, options))
            for peer, model in peers.items():
                theirs[peer].append(max(rate(model, vocab_size, lengths, size, options) for size in sizes))
            if tei:
                numbers = numbers_of_tokens(lengths, options.texts)
                theirs["tei"].append(max(tei.rate(numbers, size) for size in [*sizes, options.texts]))
        ours = statistics.median(ours)
        row = dict(row="embed-peers", input=lengths, threads=options.threads, texts=options.texts, texts_per_s=round(ours, 1),
                   openvino_precision=peers["openvino"].precision())
        for peer, rates in theirs.items():
            theirs = statistics.median(rates)
            row |= {f"{peer}_texts_per_s": round(theirs, 1), f"times_{peer}": round(ours / theirs, 2)}
        print(json.dumps(row), flush=True)


def measure(lengths, options):
    """Texts in a second that the library embeds."""
    if not options.cpu_time:
        return run(lengths, options, num_rounds=1)["texts_per_s"]
    num_rounds = max(8, 1024 * options.texts // sum(numbers_of_tokens(lengths, options.texts)))
    seconds = [cpu_seconds(lambda: run(lengths, options, num)) for num in [1, 1 + num_rounds]]
    return num_rounds * options.texts / (seconds[1] - seconds[0])


def run(lengths, options, num_rounds):
    arguments = [options.measure, "embed", "--model", options.model, "--texts", options.texts, "--input", lengths,
                 "--threads", options.threads, "--max-num-tokens", options.max_num_tokens, "--rounds", num_rounds, "--json"]
    if options.instructions:
        arguments += ["--instructions", options.instructions]
    result = subprocess.run(list(map(str, arguments)), check=True, capture_output=True, text=True)
    return json.loads(result.stdout)


def cpu_seconds(call):
    """Those that programs which the call runs compute for."""
    seconds = []
    for body in [lambda: None, call]:
        body()
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(usage.ru_utime + usage.ru_stime)
    return seconds[1] - seconds[0]


class OpenVino:
    """A model of sentence-transformers, compiled by OpenVINO for each shape of a batch."""

    def __init__(self, model, threads):
        example = torch.ones(1, 8, dtype=torch.int64)
        self.model = openvino.convert_model(Embeddings(model), example_input=(example, example))
        self.config = dict(PERFORMANCE_HINT="LATENCY", INFERENCE_NUM_THREADS=threads)
        self.compiled = {}

    def __call__(self, inputs):
        tokens = inputs["input_ids"]
        shape = tuple(tokens.shape)
        if shape not in self.compiled:
            self.model.reshape({place: list(shape) for place in range(2)})
            self.compiled[shape] = openvino.compile_model(self.model, "CPU", self.config)
        return self.compiled[shape]([tokens.numpy(), inputs["attention_mask"].numpy()])[0]

    def precision(self):
        """The type of elements that it has chosen to compute in."""
        return ", ".join({model.get_property("INFERENCE_PRECISION_HINT").get_type_name() for model in self.compiled.values()})


class Tei:
    """A server of Text Embeddings Inference for a model of sentence-transformers."""

    def __init__(self, model, options):
        self.options = options
        self.vocab_size = model[0].auto_model.config.vocab_size
        self.pooling = model[1].pooling_mode
        self.folder = tempfile.TemporaryDirectory()
        self.export(model, pathlib.Path(self.folder.name))

    def export(self, model, folder):
        """Writes the model as this server reads it, with words that are the names of their tokens."""
        transformer = model[0].auto_model
        transformer.save_pretrained(folder)
        if self.options.tei_backend == "ort":
            tokens = torch.ones(2, 8, dtype=torch.int64)
            mask = tokens.tril(diagonal=6)
            names = ["input_ids", "attention_mask", "token_type_ids"]
            torch.onnx.export(
                States(transformer), (tokens, mask, torch.zeros_like(tokens)), str(folder / "model.onnx"), input_names=names,
                output_names=["last_hidden_state"], dynamic_axes={name: {0: "batch", 1: "length"} for name in [*names, "last_hidden_state"]},
                opset_version=17, dynamo=False)
            (folder / "model.safetensors").unlink()
        words = Tokenizer(models.WordLevel({"[UNK]": 0} | {str(token): token for token in range(1, self.vocab_size)}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        words.save(str(folder / "tokenizer.json"))

    def __enter__(self):
        with socket.socket() as free, socket.socket() as other:
            free.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            (self.port, metrics_port) = (place.getsockname()[1] for place in [free, other])
        threads = str(self.options.threads)
        cpus = sorted(os.sched_getaffinity(0))[:self.options.threads]
        arguments = [self.options.tei, "--model-id", self.folder.name, "--hostname", "127.0.0.1", "--port", self.port, "--prometheus-port",
                     metrics_port, "--dtype", "float32", "--pooling", self.pooling, "--max-client-batch-size", 4096, "--max-concurrent-requests", 4096,
                     "--disable-spans"]
        environment = os.environ | dict.fromkeys(["MKL_NUM_THREADS", "OMP_NUM_THREADS", "RAYON_NUM_THREADS"], threads)
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(list(map(str, arguments)), env=environment, preexec_fn=lambda: os.sched_setaffinity(0, cpus),
                                        stdout=self.log, stderr=self.log)
        until = time.monotonic() + 120
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > until:
                self.log.seek(0)
                log = self.log.read().decode()
                self.__exit__()
                raise RuntimeError(f"{self.options.tei} does not serve:\n{log}")
            time.sleep(0.2)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.log.close()
        self.folder.cleanup()

    def is_ready(self):
        try:
            return self.request("health").status == 200
        except urllib.error.URLError:
            return False

    def request(self, path, **fields):
        body = json.dumps(fields).encode() if fields else None
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as response:
            response.read()
            return response

    def rate(self, lengths, batch_size):
        """Texts in a second that it embeds, in requests of so many, longest first."""
        texts = [" ".join(str(1 + (7919 * (index + 1) + 31 * place) % (self.vocab_size - 1)) for place in range(length))
                 for index, length in enumerate(sorted(lengths, reverse=True))]
        self.request("embed", inputs=texts[:8])
        milliseconds = 0
        for start in range(0, len(texts), batch_size):
            times = self.request("embed", inputs=texts[start:start + batch_size]).headers
            milliseconds += int(times["x-total-time"]) - int(times["x-tokenization-time"])
        return 1000 * len(texts) / milliseconds


class States(torch.nn.Module):
    """The states of a transformer, without its dictionaries."""

    def __init__(self, transformer):
        super().__init__()
        self.transformer = transformer

    def forward(self, tokens, mask, types):
        return self.transformer(input_ids=tokens, attention_mask=mask, token_type_ids=types).last_hidden_state


class Embeddings(torch.nn.Module):
    """The embeddings of a model of sentence-transformers, without its dictionaries."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, mask):
        return self.model(dict(input_ids=tokens, attention_mask=mask))["sentence_embedding"]


def numbers_of_tokens(lengths, num_texts):
    """Those of the texts of a row, as `inflight-measure embed` has them."""
    ends = [int(end) for end in lengths.split("-")]
    first, last = ends[0], ends[-1]
    return [first + (last - first) * (7919 * index % num_texts) // max(1, num_texts - 1) for index in range(num_texts)]


def rate(model, vocab_size, lengths, batch_size, options):
    """Texts in a second that the peer embeds, after all of them once: a batch of another shape may be compiled
    first."""
    num_texts, now = options.texts, time.process_time if options.cpu_time else time.perf_counter
    tokens = [torch.tensor([(7919 * (index + 1) + 31 * place) % vocab_size for place in range(num_tokens)])
              for index, num_tokens in enumerate(numbers_of_tokens(lengths, num_texts))]
    tokens.sort(key=len, reverse=True)
    batches = [padded(tokens[start:start + batch_size]) for start in range(0, num_texts, batch_size)]
    with torch.inference_mode():
        for _ in range(2):
            started = now()
            for batch in batches:
                model(batch)
        return num_texts / (now() - started)


def padded(tokens):
    """A batch, each text as long as the longest."""
    pad = lambda rows: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return dict(input_ids=pad(tokens), attention_mask=pad([torch.ones_like(row) for row in tokens]))


def make(folder, num_layers, pooling):
    torch.manual_seed(0)
    config = BertConfig(vocab_size=30522, hidden_size=384, num_hidden_layers=num_layers, num_attention_heads=12, intermediate_size=1536)
    base = folder / "base"
    BertModel(config).save_pretrained(base)
    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[UNK]").save_pretrained(base)
    modules = [Transformer(str(base)), Pooling(config.hidden_size, pooling_mode=pooling), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder))


if __name__ == "__main__":
    main()
