"""OpenVINO GenAI's continuous batching behind Triton's Python backend: a thread runs its steps and sends each
new token."""

import json
import locale
import os
import queue
import sys
import threading

# The backend's stub starts Python in isolated mode, with ASCII as encoding.
locale.setlocale(locale.LC_ALL, "C.UTF-8")
sys.path[:0] = os.environ["PEER_PACKAGES"].split(os.pathsep)

import numpy  # noqa: E402  they are in that folder
import openvino  # noqa: E402
import openvino_round  # noqa: E402
import triton_python_backend_utils as pb_utils  # noqa: E402


class TritonPythonModel:
    def initialize(self, args):
        self.pipe = openvino_round.pipeline(os.environ["PEER_MODEL"])
        self.jobs = queue.Queue()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def execute(self, requests):
        for request in requests:
            ids = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()
            num_tokens = json.loads(request.parameters())["max_tokens"]
            self.jobs.put((ids.astype(numpy.int64), num_tokens, request.get_response_sender()))

    def work(self):
        num_requests = 0
        running = []
        while True:
            while not running or not self.jobs.empty():
                job = self.jobs.get()
                if job is None:
                    return
                ids, num_tokens, sender = job
                config = openvino_round.generation(num_tokens)
                handle = self.pipe.add_request(num_requests, openvino.Tensor(ids), config)
                running.append([handle, num_tokens, sender])
                num_requests += 1
            self.pipe.step()
            for request in running:
                self.send(request)
            running = [request for request in running if request[1] > 0]

    def send(self, request):
        """Sends a request's new tokens and decrements its remaining number."""
        handle, _, sender = request
        while handle.can_read():
            for output in handle.read().values():
                ids = numpy.array(output.generated_ids, numpy.int32)
                request[1] -= len(ids)
                flags = 0 if request[1] > 0 else pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("output_ids", ids)]), flags=flags)

    def finalize(self):
        self.jobs.put(None)
        self.thread.join(10)
