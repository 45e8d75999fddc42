"""Questions about one document: its keys and values are computed once, and found again by whoever comes later.

python examples/02_shared_prefix.py [MODEL]
"""

import sys

from octavo import LLM, SamplingParams

DOCUMENT = """\
The harbour opens at six. Boats longer than twelve metres moor at the outer pier, all others in the basin. Fuel is sold
at the north quay until noon. The harbour master answers on channel nine. Dogs are welcome on a lead. Fishing from the
piers is allowed after sunset, but not in May and June, when the terns breed.
"""
QUESTIONS = ("When does the harbour open?", "Where is fuel sold?", "When may I fish?")

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
params = SamplingParams(max_tokens=16, temperature=0.0)


def ask(*questions: str) -> None:
    """Print how many tokens of each prompt came from the cache."""
    for output in llm.generate([f"{DOCUMENT}\nQuestion: {question}\nAnswer:" for question in questions], params):
        num_tokens, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
        print(f"{num_cached:>4} of {num_tokens} prompt tokens from the cache:{output.outputs[0].text!r}")


ask(QUESTIONS[0])  # nothing is cached yet
ask(*QUESTIONS)  # the first repeats itself, the others share the document
