"""The reward of recipe.yaml: called once for each response, with the "output" of its prompt as the answer."""


def sorted_digits(prompt: str, response: str, answer: str) -> float:
    """Return 1 where the digits of the response are the answer, else half the share of digits at their places."""
    digits = "".join(filter(str.isdigit, response))
    if digits == answer:
        return 1.0
    right = sum(mine == theirs for mine, theirs in zip(digits, answer, strict=False))
    return 0.5 * right / max(len(digits), len(answer))
