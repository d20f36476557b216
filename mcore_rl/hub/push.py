"""Uploads an export to the Hub.  The token is that of HF_TOKEN or of ``hf auth login``; no option takes one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.ground.errors import ConfigError, Violation
from mcore_rl.ground.secrets import MASK
from mcore_rl.hub.names import A_NAME, NO_NAME, is_repository

OPTION = "--push-to-hub"
MAIN = "main"  # the branch that people get who ask for no other
ENTER = "Set HF_TOKEN to a token that may write, or log in with: hf auth login"
# Of an earlier export in the same repository, which the new one replaces as a whole.
STALE = ["*.safetensors", "*.safetensors.index.json"]

SIGNED = re.compile(r"(https?://[^\s?]+)\?[^\s'\"]+")


@dataclass(frozen=True)
class Target:
    """A repository to write to, in whose place the token was asked for.

    name: ``owner/name``.  private: when made.  key: what named it, for messages.
    """

    name: str
    private: bool
    key: str = OPTION

    def demand_login(self) -> None:
        """Raises ConfigError where nobody is logged in, or the Hub cannot be asked who it is."""
        from huggingface_hub import HfApi, constants, get_token

        if constants.is_offline_mode():
            raise self._refused("HF_HUB_OFFLINE forbids to ask the Hub", f"Unset it, or leave {self.key} out")
        if get_token() is None:
            raise self._refused(f"nobody is logged in at {constants.ENDPOINT}", ENTER)
        with self._told("nothing was done yet"):
            HfApi().whoami()

    def by_hand(self, folder: Path, branch: str = MAIN) -> str:
        """Words of a user who is to upload ``folder``, for messages."""
        words = ["hf", "upload", self.name, str(folder)]
        words += [] if branch == MAIN else ["--revision", branch]
        words += ["--private"] if self.private else []  # else it would be made for all to see
        return f"upload it with: {shlex.join(words)}"

    def push(self, folder: Path, left: str, branch: str = MAIN, message: str = "Export of mcore_rl") -> str:
        """Uploads all of ``folder`` as one commit, and returns its address.  Raises ConfigError where it may not.

        left: what a user has then, for the message.  branch: it is made from the main one if it is not there.
        """
        from huggingface_hub import HfApi

        with self._told(left):
            api = HfApi()
            api.create_repo(self.name, private=self.private or None, exist_ok=True)
            if branch != MAIN:
                api.create_branch(self.name, branch=branch, exist_ok=True)
            done = api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                revision=branch,
                commit_message=message,
                delete_patterns=STALE,
            )
        return str(done.commit_url)

    def _refused(self, problem: str, remedy: str) -> ConfigError:
        return ConfigError([Violation(self.key, self.name, problem, remedy)])

    @contextmanager
    def _told(self, left: str) -> Iterator[None]:
        """What the Hub, the network and the disk answer, as ConfigError.  left: what is there then."""
        import httpx2
        from huggingface_hub import constants, errors

        where = constants.ENDPOINT
        try:
            yield
        except (errors.HfHubHTTPError, errors.LocalTokenNotFoundError) as error:
            status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 401
            if status in (401, 403):
                raise self._refused(f"{where} does not let you write there ({status}); {left}", ENTER) from error
            raise self._refused(f"{where} answers {status}: {_said(error)}; {left}", "Try again later") from error
        except (httpx2.HTTPError, OSError, RuntimeError, ValueError) as error:
            problem = f"could not be written at {where}: {_said(error)}; {left}"
            raise self._refused(problem, "Try again later") from error


def target(name: str, *, private: bool, key: str = OPTION) -> Target:
    """The repository called ``name``.  Raises ConfigError if that is no name of one."""
    if not is_repository(name):
        raise ConfigError([Violation(key, name, NO_NAME, A_NAME)])
    return Target(name, private, key)


def _said(error: Exception) -> str:
    """The words of ``error``, without the token and without what signs an address."""
    from huggingface_hub import get_token

    said = " ".join(str(error).split()) or type(error).__name__
    if token := get_token():
        said = said.replace(token, MASK)
    return SIGNED.sub(rf"\1?{MASK}", said)[:300]
