"""Uploads an export to the Hub.  The token is that of HF_TOKEN or of ``hf auth login``; no option takes one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.errors import ConfigError, Violation
from mcore_rl.hub.names import MODEL, hub_name

KEY = "--push-to-hub"
ENTER = "Set HF_TOKEN to a token that may write, or log in with: hf auth login"
# Of an earlier export in the same repository, which the new one replaces as a whole.
STALE = ["*.safetensors", "*.safetensors.index.json"]


@dataclass(frozen=True)
class Target:
    """A repository to write to, in whose place the token was asked for.  name: ``owner/name``.  private: when made."""

    name: str
    private: bool

    def demand_login(self) -> None:
        """Raises ConfigError where nobody is logged in, or the Hub cannot be asked who it is."""
        from huggingface_hub import HfApi, constants, get_token

        if constants.is_offline_mode():
            raise _refused(self.name, "HF_HUB_OFFLINE forbids to ask the Hub", "Unset it, or leave --push-to-hub out")
        if get_token() is None:
            raise _refused(self.name, f"nobody is logged in at {constants.ENDPOINT}", ENTER)
        with _told(self.name, "nothing was converted"):
            HfApi().whoami()

    def push(self, folder: Path) -> str:
        """Uploads all of ``folder`` as one commit, and returns its address.  Raises ConfigError where it may not."""
        from huggingface_hub import HfApi

        with _told(self.name, f"{folder} is complete; upload it with: hf upload {self.name} {folder}"):
            HfApi().create_repo(self.name, private=self.private or None, exist_ok=True)
            done = HfApi().upload_folder(
                repo_id=self.name, folder_path=folder, commit_message="Export of mcore_rl", delete_patterns=STALE
            )
        return str(done.commit_url)


def target(name: str, *, private: bool) -> Target:
    """The repository called ``name``.  Raises ConfigError if that is no name of one."""
    text = name if "/" in name else ""
    repository = hub_name(f"{text}@main", MODEL)  # with a revision, which no folder of that name has
    if repository is None or "@" in name or repository.name != name:
        raise _refused(name, "is no name of a repository", "Write OWNER/NAME, of letters, digits, -, _ and .")
    return Target(name, private)


def _refused(name: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError([Violation(KEY, name, problem, remedy)])


@contextmanager
def _told(name: str, left: str) -> Iterator[None]:
    """What the Hub, the network and the disk answer, as ConfigError.  left: what is there then."""
    import httpx2
    from huggingface_hub import constants, errors

    where = constants.ENDPOINT
    try:
        yield
    except (errors.HfHubHTTPError, errors.LocalTokenNotFoundError) as error:
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 401
        said = " ".join(str(error).split())[:300]
        if status in (401, 403):
            raise _refused(name, f"{where} does not let you write there ({status}); {left}", ENTER) from error
        raise _refused(name, f"{where} answers {status}: {said}; {left}", "Try again later") from error
    except (httpx2.HTTPError, OSError, RuntimeError, ValueError) as error:
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise _refused(name, f"could not be written at {where}: {said}; {left}", "Try again later") from error
