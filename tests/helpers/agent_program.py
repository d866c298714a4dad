"""An agent as somebody else would write it: the unmodified OpenAI client, its own tool, a reward at the end."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import openai

TOOL = {
    "type": "function",
    "function": {"name": "double", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}


def main() -> None:
    row = json.loads(sys.stdin.readline())
    if row["prompt"] == "sleep":
        time.sleep(1000)
    if row["prompt"] == "exit":
        sys.exit(3)
    client: Any = openai.OpenAI()
    messages: list[object] = [{"role": "user", "content": row["prompt"]}]
    first = client.chat.completions.create(model="any", messages=messages, tools=[TOOL], max_tokens=9)
    call = first.choices[0].message.tool_calls[0]
    messages += [first.choices[0].message.model_dump(exclude_none=True)]
    doubled = 2 * json.loads(call.function.arguments)["x"]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": str(doubled)}]
    stream = client.chat.completions.create(model="any", messages=messages, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    print("said", text)
    print(json.dumps({"reward": float(text == str(row["answer"])), "components": {"turns": 2}}))


if __name__ == "__main__":
    main()
