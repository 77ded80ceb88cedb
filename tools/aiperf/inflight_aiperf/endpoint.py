"""AIPerf's template endpoint, extended by the token counts in the outputs of a response."""

from aiperf.common.models import ParsedResponse
from aiperf.endpoints.template_endpoint import TemplateEndpoint


class GenerateEndpoint(TemplateEndpoint):
    """Triton's generate and generate_stream."""

    def parse_response(self, response):
        parsed = super().parse_response(response)
        outputs = response.get_json() or {}
        num_input_tokens = outputs.get("num_input_tokens")
        num_output_tokens = outputs.get("num_output_tokens")
        if num_input_tokens is None or num_output_tokens is None:
            return parsed
        if isinstance(num_output_tokens, list):
            # One for each of several sequences.
            num_output_tokens = sum(num_output_tokens)
        usage = {"prompt_tokens": num_input_tokens, "completion_tokens": num_output_tokens}
        data = parsed.data if parsed else None
        return ParsedResponse(perf_ns=response.perf_ns, data=data, usage=usage)
