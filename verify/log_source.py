"""Where the files of a run's log come from: a folder, or a web server that serves such a folder (SPEC 8.12).

The only file of verify/ that uses the network, and only for a log that was named by its URL. Nothing of what comes
is believed: sizes are bounded here, everything else is checked by run_audit.py.
"""

from __future__ import annotations

import json
import re
import shutil
import stat
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, Protocol

from protocol.errors import DecodeError, PolicyError, UsageError
from protocol.outputs import cause
from protocol.policy import Manifest, check_manifest, version_name

MAX_INDEX_BYTES: Final = 64 * 1024
MAX_EPOCHS: Final = 2**20  # as many values as an audit chain has
MAX_GAPS: Final = 1000  # a run that is restored more often has other troubles
STEP_SECONDS: Final = 20.0  # for a connection, and between two pieces of an answer
FILE_SECONDS: Final = 600.0  # for one file
_PIECE_BYTES: Final = 1 << 16
_RUN = re.compile(r"[0-9a-f]{64}")
_EPOCH_NAME = re.compile(r"(\d{6,7})\.msgpack")


@dataclass(frozen=True, slots=True)
class Index:
    """log.json: unsigned, so only a hint of what to look for."""

    run: str
    epochs: int
    text: bytes
    passed_over: tuple[tuple[int, int], ...]  # (first, last) of versions that the trainer says it lost


class Source(Protocol):
    """`name` is a path below the log, of letters this file chose."""

    def read(self, name: str, most: int) -> bytes | None:
        """A file's bytes, None when it is not there. Raises UsageError when it cannot be had, or has more than
        `most` bytes."""

    def highest_epoch(self) -> int:
        """The last epoch there seems to be; -1 for none."""

    def policy(self, manifest: Manifest) -> Path | None:
        """The folder that is there for a policy, whatever is in it; None when there is none. Good until the next one
        is asked for. Raises PolicyError or UsageError."""

    def close(self) -> None: ...


def epoch_file(version: int) -> str:
    return f"epochs/{version_name(version)}.msgpack"


def trace_file(digest: bytes) -> str:
    return f"traces/{digest.hex()}.msgpack"


def open_source(where: str) -> Source:
    """A folder, or http(s)://… of one. Raises UsageError."""
    scheme = urllib.parse.urlsplit(where).scheme.lower()
    if scheme in ("http", "https"):
        return WebSource(where)
    if "://" in where:
        raise UsageError(f"{where}: a log is a folder, or served by http or https")
    folder = Path(where)
    expected = "give the folder that `rltrainer export-log` wrote, or the URL it is served at"
    try:
        is_folder = stat.S_ISDIR(folder.stat().st_mode)
    except FileNotFoundError:
        raise UsageError(f"there is no folder {folder}: {expected}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} cannot be read: {cause(error)}: {expected}") from None
    if not is_folder:
        raise UsageError(f"{folder} is a file: {expected}")
    return FolderSource(folder)


def read_index(source: Source) -> Index:
    """Raises UsageError when there is none, or it is being written."""
    text = source.read("log.json", MAX_INDEX_BYTES)
    if text is None:
        raise UsageError(
            "there is no log.json: this is not the log of a run, or its export never ended; give the folder that "
            "`rltrainer export-log` wrote, or its URL"
        )
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        raise _no_index("it is not JSON") from None
    if not isinstance(table, dict):
        raise _no_index("it is not a JSON object")
    run, epochs, complete = table.get("run"), table.get("epochs"), table.get("complete")
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise _no_index("its 'run' is not the 64 hex digits of a run id")
    if type(epochs) is not int or not 0 <= epochs <= MAX_EPOCHS:
        raise _no_index(f"its 'epochs' is not a whole number from 0 to {MAX_EPOCHS:,}")
    if type(complete) is not bool:
        raise _no_index("its 'complete' is neither true nor false")
    passed_over = _ranges(table.get("passed_over", []), epochs)
    if not complete:
        raise UsageError("this log is just being written, or its export was interrupted: try again after the next")
    return Index(run, epochs, text, passed_over)


def _no_index(why: str) -> UsageError:
    return UsageError(
        f"log.json is not the index of a log: {why}; give the folder that `rltrainer export-log` wrote, or its URL, "
        "and where this is that one export or fetch it again"
    )


def _ranges(value: Any, epochs: int) -> tuple[tuple[int, int], ...]:
    """(first, last) of runs of versions, rising. Raises UsageError."""
    wrong = "its 'passed_over' is not a list of [first, last] of versions, rising and below 'epochs'"
    found: list[tuple[int, int]] = []
    for each in value if isinstance(value, list) and len(value) <= MAX_GAPS else [None]:
        if not isinstance(each, list) or len(each) != 2 or any(type(number) is not int for number in each):
            raise _no_index(wrong)
        first, last = each
        if not (found[-1][1] if found else -1) < first <= last < epochs:
            raise _no_index(wrong)
        found.append((first, last))
    return tuple(found)


class FolderSource:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str, most: int) -> bytes | None:
        path = self._folder / name
        try:
            # A pipe or a device has no end, and opening one may wait for ever.
            if not stat.S_ISREG(path.stat().st_mode):
                raise UsageError(f"{path} is not a regular file: export the log again")
            with path.open("rb") as file:
                data = file.read(most + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {cause(error)}") from None
        if len(data) > most:
            raise UsageError(f"{path} has more than {most:,} bytes")
        return data

    def highest_epoch(self) -> int:
        names = (_EPOCH_NAME.fullmatch(path.name) for path in (self._folder / "epochs").glob("*.msgpack"))
        return max((int(found[1]) for found in names if found), default=-1)

    def policy(self, manifest: Manifest) -> Path | None:
        folder = self._folder / "policies" / version_name(manifest.version)
        return folder if folder.is_dir() else None

    def close(self) -> None:
        pass


class WebSource:
    """Files below a URL, each in one GET."""

    def __init__(self, url: str) -> None:
        self._base = url.rstrip("/") + "/"
        self._fetched: Path | None = None
        # Handlers by name: the default opener would also follow a link to file: or ftp:.
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(),
            urllib.request.HTTPDefaultErrorHandler(),
            _SameHost(),
            urllib.request.HTTPErrorProcessor(),
        ):
            self._opener.add_handler(handler)

    def read(self, name: str, most: int) -> bytes | None:
        data = bytearray()
        return bytes(data) if self._fetch(name, most, data.extend) else None

    def _fetch(self, name: str, most: int, take: Callable[[bytes], object]) -> bool:
        """Have `take` the pieces of a file; False when it is not there."""
        url = self._base + urllib.parse.quote(name)
        until = time.monotonic() + FILE_SECONDS
        size = 0
        try:
            with self._opener.open(url, timeout=STEP_SECONDS) as reply:
                while piece := reply.read1(_PIECE_BYTES):
                    size += len(piece)
                    if size > most:
                        raise UsageError(f"{url} has more than {most:,} bytes")
                    if time.monotonic() > until:
                        raise UsageError(f"{url} was not here within {FILE_SECONDS:g} s")
                    take(piece)
                announced = reply.headers.get("Content-Length")
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (404, 410):
                return False
            raise UsageError(f"{url} cannot be had: the server answers {error.code} {error.reason}") from None
        except (OSError, HTTPException, ValueError) as error:
            raise UsageError(f"{url} cannot be had: {getattr(error, 'reason', None) or error}") from None
        if announced is not None and announced != str(size):
            raise UsageError(f"{url} was cut off after {size:,} of {announced} bytes")
        return True

    def highest_epoch(self) -> int:
        return -1  # a web server lists nothing: log.json says

    def policy(self, manifest: Manifest) -> Path | None:
        """Fetch it into a temporary folder, in place of the one before."""
        self.close()
        try:
            check_manifest(manifest)  # its names are no paths
        except DecodeError as error:
            raise PolicyError(f"its manifest is not valid: {error}") from None
        name = version_name(manifest.version)
        self._fetched = Path(tempfile.mkdtemp(prefix="rlverify-policy-"))
        for file in manifest.files:
            with (self._fetched / file.name).open("wb") as out:
                if not self._fetch(f"policies/{name}/{file.name}", file.size, out.write):
                    return None
        return self._fetched

    def close(self) -> None:
        if self._fetched is not None:
            shutil.rmtree(self._fetched, ignore_errors=True)
            self._fetched = None


class _SameHost(urllib.request.HTTPRedirectHandler):
    """A log lies in one place: whoever serves it does not send its readers to others."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if (new.scheme, new.netloc) != (old.scheme, old.netloc):
            raise urllib.error.URLError(f"it sends its readers elsewhere, to {newurl[:200]}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
