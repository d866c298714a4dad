"""An agent that plays number guessing through the OpenAI client, for `env.name: program`.

The run starts it once per conversation, with the row of the data on its standard input and `OPENAI_BASE_URL` and
`OPENAI_API_KEY` in its environment, which the client reads. Nothing in it belongs to training: it asks a model for
turns, and prints at last what the conversation was worth.
"""

from __future__ import annotations

import json
import re
import sys

from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

__all__ = ["main"]


def main() -> None:
    row = json.loads(sys.stdin.readline())
    number, reward = int(row["answer"]), 0.0
    client = OpenAI()
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": row["prompt"]}]
    while not reward:
        try:
            choice = client.chat.completions.create(model="policy", messages=messages).choices[0]
        except BadRequestError:
            break  # a limit of the recipe, such as its turns, was reached
        guesses = re.findall(r"\d+", choice.message.content or "")
        guess = int(guesses[-1]) if guesses else -1
        reward = float(guess == number)
        said = ("higher" if guess < number else "lower") if guesses else "say a number"
        messages.append({"role": "assistant", "content": choice.message.content})
        messages.append({"role": "user", "content": said})
    print(json.dumps({"reward": reward}))  # noqa: T201 - the last line states the reward


if __name__ == "__main__":
    main()
