"""Other engines on the same checkpoint in the same run, alternating with ours, and our ratio to each.

Every round measures ours and then each peer; a row has the medians. A peer that cannot be installed or cannot run on
this machine gets a row with the reason, and the others continue.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import subprocess

import rows
from engines.in_server import InServer
from engines.llama_cpp import LlamaCpp
from engines.loads import Load
from engines.openvino import OpenVino
from engines.setup import Unavailable
from engines.vllm import Vllm

IN_PROCESS = {peer.name: peer for peer in (LlamaCpp, OpenVino, Vllm)}
PEERS = [*IN_PROCESS, InServer.name]
# Long contexts: number of requests, and output tokens of each.
LONG_CONCURRENCY, LONG_OUTPUT = 8, 96


def ours(checkpoint, precision, loads):
    """One round of our engine, in process."""
    program = [os.environ["INFLIGHT_MEASURE"], "engine", "--json", "--rounds=1", "--long-context=0"]
    command = [*program, f"--model={checkpoint}", f"--precision={precision}"]
    command += [f"--prompt={load.input}" for load in loads if load.is_prompt]
    generations = [load for load in loads if not load.is_prompt]
    command += [f"--concurrency={','.join(str(load.concurrency) for load in generations)}"]
    command += [f"--input={generations[0].input}", f"--output={generations[0].output}"]
    text = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    found = {}
    for row in map(json.loads, text.splitlines()):
        if row["row"] in ("prompt", "generation"):
            load = Load(row["concurrency"], row["input"], row["output"])
            found[load] = row["prompt_tokens_per_s" if load.is_prompt else "output_tokens_per_s"]
    return {load: found[load] for load in loads}


def compared(peer, precision, our_rounds, peer_rounds):
    """A row per load: the medians and their ratio."""
    for load in our_rounds[0]:
        mine, its = ([r[load] for r in rounds] for rounds in (our_rounds, peer_rounds))
        name = "prompt_tokens_per_s" if load.is_prompt else "output_tokens_per_s"
        row = {
            "row": "prompt" if load.is_prompt else "generation",
            "peer": peer.name,
            "precision": precision,
            "peer_precision": peer.precision,
            **dataclasses.asdict(load),
        }
        # With too few tokens there is no period in which all requests generate.
        if None not in mine + its:
            mine, its = statistics.median(mine), statistics.median(its)
            row |= {name: round(mine, 1), f"peer_{name}": round(its, 1), "ratio": round(mine / its, 3)}
        yield row | {"rounds": len(peer_rounds)}


class Contest:
    """Peers that alternate with our engine."""

    def __init__(self, peers, our_round, as_json):
        self.peers = peers
        self.our_round = our_round
        self.as_json = as_json

    def run(self, num_rounds, loads, precision):
        """Prints a row per load and peer."""
        our_rounds, peer_rounds = [], {peer.name: [] for peer in self.peers}
        for _ in range(num_rounds):
            if self.peers:
                our_rounds.append(self.our_round(loads))
            for peer in list(self.peers):
                try:
                    peer_rounds[peer.name].append(peer.measure(loads))
                except Unavailable as error:
                    self.peers.remove(peer)
                    absent(peer.name, precision, error, self.as_json)
        for peer in self.peers:
            for row in compared(peer, precision, our_rounds, peer_rounds[peer.name]):
                rows.show(row, self.as_json)


def absent(name, precision, error, as_json):
    """The row of an unavailable peer."""
    rows.show({"row": "absent", "peer": name, "precision": precision, "reason": str(error)}, as_json)


def made(name, kind, options, *arguments):
    """A peer, or a row with the reason why it is unavailable."""
    try:
        return [kind(*arguments)]
    except Unavailable as error:
        absent(name, options.precision, error, options.json)
        return []


def in_process(options, names, loads):
    """Peers that are programs of their own, one after the other."""
    peers = []
    for name in names:
        peers += made(name, IN_PROCESS[name], options, options.model, options.precision)
    contest = Contest(peers, functools.partial(ours, options.model, options.precision), options.json)
    contest.run(options.rounds, loads, options.precision)
    long = long_context(options)
    if long:
        contest.run(options.rounds, [long], options.precision)


def in_server(options, loads):
    """Peers that are models of the same server."""
    for server in made(InServer.name, InServer, options, options.model, options.precision, loads):
        try:
            contest = Contest([server], server.measure_ours, options.json)
            contest.run(options.rounds, loads, options.precision)
        finally:
            server.stop()


def long_context(options):
    """The long-context load, limited to the model's positions; None if it is disabled."""
    positions = json.loads((options.model / "config.json").read_text())["max_position_embeddings"]
    num_input = min(options.long_context, positions - LONG_OUTPUT)
    return Load(LONG_CONCURRENCY, num_input, LONG_OUTPUT) if num_input > 0 else None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=lambda text: pathlib.Path(text).resolve(), required=True)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--precision", choices=["bf16", "int8", "int4"], default="bf16")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--long-context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = options.peers.split(",")
    unknown = set(names) - set(PEERS)
    if unknown:
        parser.error(f"unknown peers {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}")
    concurrency = [int(count) for count in options.concurrency.split(",")]
    loads = [Load(1, options.prompt, 1), *(Load(count, options.input, options.output) for count in concurrency)]
    in_process(options, [name for name in names if name in IN_PROCESS], loads)
    if InServer.name in names:
        in_server(options, loads)


if __name__ == "__main__":
    main()
