"""Models named by a hub id: from the local cache where it is complete, else from the hub, with errors in seconds.

A model that is completely cached is used from there: no request is made at all, also none that asks for a newer
revision (``hf download ID`` fetches that). Anything else is asked for with one short request before transformers, which
retries for half a minute without a network, starts to load. It knows no model classes and downloads no weights itself.
"""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import get_token
from transformers.utils.hub import is_offline_mode

from specdiff2.types import ConfigError, CorruptFileError

REQUEST_SECONDS = 4.0  # to connect, and to get an answer
DEADLINE_SECONDS = 6.0  # for all of it: a resolver without a name server obeys no timeout of ours
WEIGHT_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def find_on_hub(repo: str, revision: str | None = None, file: str = "config.json") -> str:
    """The folder of ``repo`` in the local cache where it is complete (a ``file`` other than config.json: there); else
    ``repo`` itself, which the hub has just said it would hand out.

    Raises:
        ConfigError: not a hub id, not there, gated, no such revision or file, or neither cached nor reachable; with
            the command that helps. Within ``DEADLINE_SECONDS``.
    """
    try:
        cached = try_to_load_from_cache(repo, file, revision=revision)
        url = hf_hub_url(repo, file, revision=revision)
    except HFValidationError as error:
        raise ConfigError(
            f"{repo}: neither a folder nor a hub id ({error}); expected a model folder, a .gguf file, wheel:NAME or a "
            "hub id like owner/name"
        ) from error
    lacking = [file]
    if isinstance(cached, str):
        folder = Path(cached).parents[file.count("/")]
        lacking = missing_files(folder, tokenizer=True) if file == "config.json" else []
        if not lacking:
            return str(folder)
    if is_offline_mode():
        raise ConfigError(
            f"{_name(repo, revision)}: HF_HUB_OFFLINE is set, and the local cache lacks {name_some(lacking)}; unset "
            f"it, or fetch the model beforehand on a machine with network: {download_command(repo, revision)}"
        )
    _ask(url, repo, revision, file)
    return repo


def cached_folder(repo: str, revision: str | None = None) -> Path | None:
    """Where the local cache has the config.json of ``repo``, though perhaps not its weights."""
    with contextlib.suppress(HFValidationError):  # not a hub id, which ``find_on_hub`` explains
        found = try_to_load_from_cache(repo, "config.json", revision=revision)
        return Path(found).parent if isinstance(found, str) else None
    return None


def missing_files(folder: Path, *, tokenizer: bool = False) -> list[str]:
    """Files that a model in ``folder`` needs and that are not there: shards by name, else what would hold the weights.

    Raises:
        CorruptFileError: an index of shards cannot be read.
    """
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    indexes = [folder / name for name in WEIGHT_INDEXES if (folder / name).is_file()]
    if indexes:
        try:
            shards = set(json.loads(indexes[0].read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CorruptFileError(f"{indexes[0]}: not an index of shards ({error!r}); fetch it again") from error
        missing += sorted(shard for shard in shards if not (folder / shard).is_file())
    elif not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        missing.append("weights (*.safetensors)")
    if tokenizer and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        missing.append("tokenizer.json")
    return missing


def name_some(names: list[str]) -> str:
    """The first three, and how many more."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def download_command(repo: str, revision: str | None = None) -> str:
    return f"hf download {repo}" + (f" --revision {revision}" if revision else "")


def _name(repo: str, revision: str | None) -> str:
    return repo if revision is None else f"{repo} at revision {revision}"


def _ask(url: str, repo: str, revision: str | None, file: str) -> None:
    """One request for the headers of ``file``, in a thread that nobody waits for longer than the deadline."""
    answer: list[Exception | None] = []

    def request() -> None:
        try:
            get_hf_file_metadata(url, timeout=REQUEST_SECONDS)
            answer.append(None)
        except (HTTPError, OSError, EntryNotFoundError) as error:
            answer.append(error)

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(DEADLINE_SECONDS)
    error = answer[0] if answer else TimeoutError(f"no answer in {DEADLINE_SECONDS:.0f} s")
    if error is not None:
        raise ConfigError(_explain(error, url, repo, revision, file)) from error


def _explain(error: Exception, url: str, repo: str, revision: str | None, file: str) -> str:
    page = url.split(f"/{repo}/")[0] + f"/{repo}"
    fetch = download_command(repo, revision)
    login = "" if get_token() else "run `hf auth login` (or set HF_TOKEN), "
    if isinstance(error, GatedRepoError):
        return (
            f"{repo} is gated: accept its licence at {page} with your Hugging Face account, then {login}and fetch it: "
            f"`{fetch}`"
        )
    if isinstance(error, RepositoryNotFoundError):
        access = f"{login}then `{fetch}`" if login else "use the token of an account that may read it (`hf auth login`)"
        return f"{repo}: the hub has no such model, or it is private; check the spelling at {page}; private: {access}"
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}; choose a branch, tag or commit from {page}/commits/main, or null"
    if isinstance(error, EntryNotFoundError):
        hint = " (a repository of GGUF files needs verifier.gguf_file)" if file == "config.json" else ""
        return f"{_name(repo, revision)} holds no {file}{hint}; its files: {page}/tree/{revision or 'main'}"
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"{_name(repo, revision)} is not in the local cache, and {page} cannot be reached ({reason}); check the "
        f"network, or fetch it on a machine that has one: `{fetch}`, and copy "
        "~/.cache/huggingface (or set verifier.source to a copied folder)"
    )
