"""The tokens of the synthetic runner, from the four lines of its documentation (src/runner/synthetic.rs)."""

MASK = (1 << 64) - 1


def _mix(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def continuation(prompt, num_tokens, vocab_size=32000):
    """The tokens that follow a prompt."""
    entry = 0
    tokens = []
    for token in prompt:
        entry = _mix((entry + 0x9E3779B97F4A7C15 * (token + 1)) & MASK)
    for _ in range(num_tokens):
        tokens.append(entry % vocab_size)
        entry = _mix((entry + 0x9E3779B97F4A7C15 * (tokens[-1] + 1)) & MASK)
    return tokens
