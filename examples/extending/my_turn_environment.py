"""An environment of your own with turns: guess a word letter by letter.

Use it with `env.name: "examples.extending.my_turn_environment:Hangman"` and `experience.conversation.enabled: true`.
The class is made once; each row is a conversation in its own process, so nothing here needs to be safe against
anything: what raises, hangs or exits ends its own row, which is then left out and never gets reward 0.
"""

from __future__ import annotations

from nemo_rl.data.conversation import Message
from nemo_rl.environments.conversation import ConversationRow, Reply, Turn

__all__ = ["Hangman"]


class Hangman:
    """Guess a word letter by letter; the answer of the row is the word.

    Args:
        lives: wrong letters that end the game.
    """

    def __init__(self, *, lives: int = 6) -> None:
        self._lives = lives

    def open(self, row: ConversationRow) -> Game:
        """Begin a game. Random choices, if there were any, would come from `row.seed`."""
        return Game(str(row.answer), lives=self._lives)


class Game:
    """One row."""

    def __init__(self, word: str, *, lives: int) -> None:
        self._word, self._lives = word, lives
        self._seen: set[str] = set()

    def reply(self, turn: Turn) -> Reply:
        """Take the last letter that the model wrote, and say what it reads next."""
        letters = [char for char in turn.text.lower() if char.isalpha()]
        if not letters:
            return Reply(messages=(Message(role="user", content="Say a letter."),))
        letter = letters[-1]
        is_new_hit = letter in self._word and letter not in self._seen
        self._seen.add(letter)
        self._lives -= letter not in self._word
        shown = " ".join(char if char in self._seen else "_" for char in self._word)
        if "_" not in shown:
            return Reply(done=True, reward=1.0)
        if self._lives <= 0:
            return Reply(done=True, reward=0.0)
        # The reward of a turn is small, so that their sum over a game stays below that of a word that is found.
        return Reply(
            messages=(Message(role="user", content=f"{shown} ({self._lives} lives left)"),),
            reward=0.1 / len(set(self._word)) if is_new_hit else 0.0,
            components={"hits": float(is_new_hit)},
        )

    def close(self) -> None:
        """Free what the game holds, such as a file or a server; called in every case. May be left out."""
