"""What the server with OpenAI's API costs beside tritonserver: its time to the first token above that of gRPC, and its
CPU time for a token of many streams. The demo model, and the clients of crates/openai/examples/front-cost.rs."""

import argparse
import json
import os
import pathlib
import subprocess
import tempfile

import rows
from harness.front import Front
from harness.repository import STORIES, add_model
from harness.server import Server


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--firsts", type=int, default=300)
    parser.add_argument("--streams", default="1,64")
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        repository = pathlib.Path(folder) / "repository"
        add_model(repository, "stories", checkpoint=STORIES)
        with Server(repository) as server, Front(server) as front:
            for streams in options.streams.split(","):
                command = [
                    os.environ["INFLIGHT_FRONT_COST"],
                    f"--triton={server.grpc_url}",
                    f"--front={front.address}",
                    f"--pid={front.process.pid}",
                    "--model=stories",
                    f"--firsts={options.firsts}",
                    f"--streams={streams}",
                    f"--tokens={options.tokens}",
                    f"--rounds={options.rounds}",
                ]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
                rows.show(json.loads(done.stdout), options.json)


if __name__ == "__main__":
    main()
