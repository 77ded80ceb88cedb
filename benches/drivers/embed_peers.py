#!/usr/bin/env python3
"""How many texts sentence-transformers on torch, and OpenVINO, embed in a second on the CPU, in turns with `inflight-measure embed`.

    pip install torch transformers sentence-transformers openvino
    python benches/drivers/embed_peers.py --make /tmp/minilm       # a model of the shape of all-MiniLM-L6, with random weights
    python benches/drivers/embed_peers.py --model /tmp/minilm --measure target/release/inflight-measure
    python benches/drivers/embed_peers.py --make /tmp/bge --layers 12 --pooling cls     # of the shape of bge-small-en-v1.5

Texts are tokens, so that neither side tokenises. Those of a row have one length, so that nothing is padded; or, with `--input 16-128`, lengths
from 16 to 128, which come in a mixed order: the peers, like sentence-transformers' `encode`, have all texts at once, sort them by length, and
pad a batch to its longest. Of a peer, the fastest of its batch sizes counts; ours has its own batching, in the order in which texts come.
Each round runs all; figures are medians of the rounds. OpenVINO has the model that sentence-transformers holds, with its pooling, compiled
for each shape. It computes in what it chooses, which the row tells: bf16 where the processor has AMX or AVX-512 BF16, as ours always does;
so does torch in bf16. All sum up in f32.

On a machine that others use, `--cpu-time` with one thread counts the seconds that the processor worked for each side, not those that passed.
"""

import argparse
import json
import pathlib
import resource
import statistics
import subprocess
import time

import openvino
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models
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
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    options = parser.parse_args()
    if options.make:
        return make(options.make, options.layers, options.pooling)
    torch.set_num_threads(options.threads)
    torch_models = {dtype: SentenceTransformer(str(options.model), device="cpu", model_kwargs=dict(dtype=getattr(torch, dtype))).eval()
                    for dtype in ["float32", "bfloat16"]}
    vocab_size = torch_models["float32"][0].auto_model.config.vocab_size
    peers = dict(torch_models, openvino=OpenVino(torch_models["float32"], options.threads))
    for lengths in options.input.split(","):
        ours, theirs = [], {peer: [] for peer in peers}
        for _ in range(options.rounds):
            ours.append(measure(lengths, options))
            for peer, model in peers.items():
                sizes = map(int, options.batch_sizes.split(","))
                theirs[peer].append(max(rate(model, vocab_size, lengths, size, options) for size in sizes))
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
    """Texts in a second that the peer embeds, after all of them once: a batch of another shape may be compiled first."""
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
