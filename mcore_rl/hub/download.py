"""What an id names, from the Hub's cache or downloaded into it; huggingface_hub does the work.

Of a model come config.json, tokenizer and those safetensors that its index names; of a data set the files of a split.
All of one call are of one commit.  A second call with everything there asks one question, and none where the id has a
commit or HF_HUB_OFFLINE is set.

Invariant: nothing is written outside the Hub's cache, and no file of code is taken.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mcore_rl.hub.names import HubName, is_inside
from mcore_rl.hub.selection import CONFIG, INDEX, ModelPart, SelectionError, small_files, tables_of, weight_files

if TYPE_CHECKING:
    from huggingface_hub import ResolvedRevision

COMMIT = re.compile(r"[0-9a-f]{40}")
THERE = "Mend the id, or name a local folder"
ENTER = "set HF_TOKEN, or log in with: hf auth login"


class NotFetchedError(SelectionError):
    """The Hub or its cache does not have it; (what is wrong, what to write instead)."""


def model_folder(name: HubName, part: ModelPart) -> Path:
    """The folder in the cache with ``part`` of a model, which is downloaded if it is not there.

    Raises NotFetchedError, also where the model has no safetensors.
    """
    with _told(name):
        revision = _commit(name)
        folder = _snapshot(name, revision, [CONFIG])
        if part is ModelPart.config:
            return folder
        names = _names(name, revision, folder)
        _snapshot(name, revision, small_files(names))
        if part is ModelPart.weights:
            _snapshot(name, revision, weight_files(names, folder / INDEX))
        return folder


def data_files(name: HubName, split: str) -> list[Path]:
    """The files in the cache of ``split`` of a data set, which are downloaded if they are not there.

    Raises NotFetchedError, also where it does not follow which files are meant.
    """
    with _told(name):
        revision = _commit(name)
        folder = _snapshot(name, revision, [])
        at = f"{name.name}{f'@{name.revision}' if name.revision else ''}:"
        chosen = tables_of(_names(name, revision, folder), split, name.path, prefix=at)
        _snapshot(name, revision, chosen)
        return [folder / each for each in chosen]


def _commit(name: HubName) -> ResolvedRevision:
    from huggingface_hub import HfApi

    revision = HfApi().resolve_revision(name.name, repo_type=name.kind, revision=name.revision)
    if not COMMIT.fullmatch(revision.resolved):
        raise NotFetchedError(f"has the commit {revision.resolved!r}, which is no hash", "Ask who runs HF_ENDPOINT")
    return revision


def _snapshot(name: HubName, revision: ResolvedRevision, files: Sequence[str]) -> Path:
    """The folder of the commit, with ``files`` in it, and the listing of the commit in the cache."""
    from huggingface_hub import snapshot_download

    if odd := [each for each in files if not is_inside(each)]:
        raise NotFetchedError(f"has the file {odd[0]!r}, which would leave the cache", "Name another model")
    exactly = [glob.escape(each) for each in files] or ["/"]  # no file is called so
    folder = Path(snapshot_download(name.name, repo_type=name.kind, revision=revision, allow_patterns=exactly))
    if absent := [each for each in files if not (folder / each).is_file()]:
        raise NotFetchedError(f"has no {absent[0]}", THERE)
    return folder


def _names(name: HubName, revision: ResolvedRevision, folder: Path) -> list[str]:
    """The files of the commit; where only an older client filled the cache, and nobody can be asked, those there."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return [each.path for each in get_cached_repo_tree(name.name, repo_type=name.kind, revision=revision)]
    except CachedRepoTreeNotFoundError:
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


@contextmanager
def _told(name: HubName) -> Iterator[None]:
    """Everything that the Hub, its client, the network and the disk can answer, as NotFetchedError."""
    import httpx2
    from huggingface_hub import constants, errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not Console(stderr=True).is_terminal:
        disable_progress_bars()  # which a log file would have thousands of lines of
    where = constants.ENDPOINT
    kind = "data set" if name.kind == "dataset" else "model"
    cache = constants.HF_HUB_CACHE
    offline = constants.is_offline_mode()
    fetch = f"Fetch it where there is a network, with: hf download {name.name}"
    fetch += " --repo-type dataset" if name.kind == "dataset" else ""
    try:
        yield
    except SelectionError as error:
        raise NotFetchedError(error.problem, error.remedy) from error
    except errors.GatedRepoError as error:
        page = f"{where}/{'datasets/' if name.kind == 'dataset' else ''}{name.name}"
        said = "is gated: its owners say who may read it, and they let nobody in without a token that they know"
        raise NotFetchedError(said, f"Ask for access at {page}, then {ENTER}") from error
    except errors.RevisionNotFoundError as error:
        raise NotFetchedError(
            f"has no revision {name.revision}", "Write one of its branches, tags or commits"
        ) from error
    except errors.DisabledRepoError as error:
        raise NotFetchedError("is disabled on the Hub", THERE) from error
    except errors.RepositoryNotFoundError as error:
        said = f"there is no such path here, and {where} has no such {kind}, or hides it from you"
        raise NotFetchedError(said, f"{THERE}; of a private one, {ENTER}") from error
    except (errors.LocalEntryNotFoundError, errors.RevisionResolutionError, errors.OfflineModeIsEnabled) as error:
        said = f"there is no such path here, and the {kind} is not in the cache {cache}, or not whole"
        if offline:
            raise NotFetchedError(f"{said}, where HF_HUB_OFFLINE says to look", f"{fetch}; or unset it") from error
        raise NotFetchedError(f"{said}, and {where} cannot be reached", f"{fetch}; or name a local folder") from error
    except errors.HfHubHTTPError as error:
        said = f"{where} answers {error.response.status_code}: {_line(error)}"
        raise NotFetchedError(said, f"Try again later; of a private one, {ENTER}") from error
    except (httpx2.HTTPError, errors.FileMetadataError) as error:
        raise NotFetchedError(f"{where} cannot be asked: {_line(error)}", fetch) from error
    except OSError as error:
        free = "Make room there, or set HF_HOME to another disk" if os.path.exists(cache) else "Set HF_HOME"
        raise NotFetchedError(f"cannot be kept in {cache}: {_line(error)}", free) from error


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().partition("\n")[0].rstrip(".")
