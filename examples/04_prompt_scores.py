"""How likely does the model find a text? Scores of its tokens, without generating anything.

python examples/04_prompt_scores.py [MODEL]
"""

import math
import sys

from octavo import LLM, SamplingParams

TEXTS = ("The cat sat on the mat and purred.", "The cat sat on the mat and parliament.")

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")

for output in llm.generate(TEXTS, SamplingParams(max_tokens=0, prompt_logprobs=0)):
    # The first token has no score: nothing comes before it.
    places = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    scores = [candidates[token_id] for token_id, candidates in places]
    mean = sum(score.logprob for score in scores) / len(scores)
    least = min(scores, key=lambda score: score.logprob)
    print(f"{output.prompt!r}: perplexity {math.exp(-mean):.1f}")
    print(f"  least expected: {least.decoded_token!r}, log-probability {least.logprob:.2f}, rank {least.rank:,}")
