"""JSON lines, the Pile's format: one object a line."""

import json
import math
from collections.abc import Iterator
from typing import Any

from ttt_adapt.config import CorpusSettings
from ttt_adapt.corpus.files import CorpusFile
from ttt_adapt.corpus.problems import Malformed, Problem, explain
from ttt_adapt.corpus.records import Record, record_of
from ttt_adapt.corpus.streams import (
    STREAM_ERRORS,
    decode_utf8,
    numbered_lines,
    open_stream,
    too_long,
)


def read_jsonl(file: CorpusFile, settings: CorpusSettings) -> Iterator[Record | Problem]:
    """Records of one file in its order; lines of white space are passed over.

    A malformed line is a problem of its own and the next one is read; a stream that breaks ends
    the file.
    """
    number = 0
    try:
        with open_stream(file.path) as stream:
            for number, line in numbered_lines(stream, settings.max_document_bytes):
                location = f"{file.label}:{number}"
                if line is None:
                    yield Problem(location, too_long(settings.max_document_bytes))
                    continue
                if line.isspace():
                    continue
                item = _record(line, settings, location)
                # Not held while the consumer works on the document: lines can be large.
                del line
                yield item
                del item
    except STREAM_ERRORS as error:
        yield Problem(f"{file.label}:{number + 1}", f"cannot be read on: {explain(error)}")


def parse_object(line: bytes) -> dict[str, Any]:
    """The JSON object of one line.

    Stricter than :mod:`json`: the constants NaN and Infinity, numbers beyond a double's range and
    unpaired surrogate escapes are refused, because what is made of them is no JSON and has no
    UTF-8 form. Of repeated keys the last one counts.

    Raises:
        Malformed: it is anything else.
    """
    text = decode_utf8(line)
    try:
        value = _DECODER.decode(text)
        if not isinstance(value, dict):
            raise Malformed(f"expected a JSON object, found {_KINDS.get(type(value), 'null')}")
        if "\\u" in text and ("\\ud" in text or "\\uD" in text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        column = min(error.pos, len(text.rstrip())) + 1
        raise Malformed(f"not valid JSON: {error.msg} at column {column}") from None
    except RecursionError:
        raise Malformed("JSON nested too deeply") from None
    except UnicodeEncodeError:
        raise Malformed("an unpaired surrogate (\\ud800 to \\udfff) has no UTF-8 form") from None
    except Malformed:
        raise
    except ValueError as error:
        # Python refuses integers of more than 4300 digits: reading them takes quadratic time.
        raise Malformed(f"a number that cannot be read: {explain(error)}") from None
    return value


_KINDS = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean"}


def _record(line: bytes, settings: CorpusSettings, location: str) -> Record | Problem:
    try:
        return record_of(parse_object(line), settings, location)
    except Malformed as error:
        return Problem(location, str(error))


def _refuse_constant(name: str) -> None:
    raise Malformed(f"not valid JSON: the constant {name}")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise Malformed(f"a number beyond a double's range: {digits[:30]}")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
