"""The reward of recipe.yaml: called once for each response, with the "output" of its prompt as the answer."""


def exact(prompt: str, response: str, answer: str) -> float:
    return float(response.strip() == answer)
