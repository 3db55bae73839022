"""The incremental detokenizer and the stop matcher: nothing lost, nothing early, bounded work."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from controller.runtime.detokenize import MAX_WINDOW_TOKENS, Detokenizer, StopMatcher

TEXTS = st.text(alphabet="ab 中文😀é\u0301\n\u200d�", max_size=40)


class ByteDecoder:
    """A byte-level tokenizer: every token id stands for a run of bytes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = list(pieces)
        self.largest_window = 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.largest_window = max(self.largest_window, len(token_ids))
        return b"".join(self.pieces[i] for i in token_ids).decode("utf-8", errors="replace")


class SentencePieceDecoder:
    """A real SentencePiece-style decoder: `▁` is a space, bytes fall back, the first space goes."""

    def __init__(self) -> None:
        words = ["<unk>", "▁", "▁the", "▁world", "ing", "a", "�", "<s>"]
        self.vocab = {word: i for i, word in enumerate(words)}
        self.num_words = len(words)
        self.vocab.update({f"<0x{byte:02X}>": self.num_words + byte for byte in range(256)})
        model = models.BPE(vocab=self.vocab, merges=[], unk_token="<unk>", byte_fallback=True)
        self.tokenizer = FastTokenizer(model)
        self.tokenizer.add_special_tokens(["<s>"])
        self.tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )

    def byte_ids(self, text: str) -> list[int]:
        return [self.num_words + byte for byte in text.encode()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


SENTENCEPIECE = SentencePieceDecoder()


def split_at(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[i:j] for i, j in itertools.pairwise(edges)]


def run(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@given(TEXTS, st.lists(st.integers(0, 200), max_size=80))
def test_any_split_of_valid_text_is_given_back_whole_and_without_a_false_replacement(
    text: str, cuts: list[int]
) -> None:
    pieces = split_at(text.encode(), cuts)
    given = run(Detokenizer(ByteDecoder(pieces)), range(len(pieces)))
    assert "".join(given) == text
    assert "".join(given).count("�") == text.count("�")


@given(st.binary(max_size=60), st.lists(st.integers(0, 200), max_size=60))
def test_invalid_bytes_are_shown_as_the_tokenizer_shows_them(data: bytes, cuts: list[int]) -> None:
    pieces = split_at(data, cuts)
    decoder = ByteDecoder(pieces)
    text = "".join(run(Detokenizer(decoder), range(len(pieces))))
    if len(pieces) <= MAX_WINDOW_TOKENS:
        assert text == decoder.decode(range(len(pieces)))
    assert text.replace("�", "") == data.decode(errors="replace").replace("�", "")


@given(st.lists(st.sampled_from([b"\xff", b"\xe4", b"\x80", b"a", b"", b"\xf0\x9f"]), max_size=300))
def test_work_per_token_is_bounded_and_held_text_too(pieces: list[bytes]) -> None:
    decoder = ByteDecoder(pieces)
    detokenizer = Detokenizer(decoder)
    given = "".join(detokenizer.push(i) for i in range(len(pieces)))
    assert decoder.largest_window <= MAX_WINDOW_TOKENS + 1
    held = len(detokenizer.flush())
    assert held <= 6
    assert given.count("a") == pieces.count(b"a")


@given(
    st.lists(
        st.one_of(
            st.sampled_from(["▁", "▁the", "▁world", "ing", "a", "<s>"]).map(
                lambda word: [SENTENCEPIECE.vocab[word]]
            ),
            st.sampled_from("中文😀é").map(SENTENCEPIECE.byte_ids),
        ),
        max_size=30,
    )
)
def test_sentencepiece_spacing_and_byte_fallback_equal_the_whole_decode(
    words: list[list[int]],
) -> None:
    ids = [token for word in words for token in word]
    prompt = [SENTENCEPIECE.vocab["▁the"]]
    whole = SENTENCEPIECE.decode([*prompt, *ids])
    given = run(Detokenizer(SENTENCEPIECE, prompt), ids)
    assert "the" + "".join(given) == whole
    assert not any("�" in piece for piece in given)


WORDS = st.one_of(
    st.sampled_from(["▁the", "▁world", "ing", "a", "<s>"]).map(
        lambda word: [SENTENCEPIECE.vocab[word]]
    ),
    st.sampled_from("中😀é𓀀\n").map(SENTENCEPIECE.byte_ids),
)


@given(st.lists(WORDS, max_size=8), st.lists(WORDS, max_size=8), st.data())
def test_a_prompt_may_end_anywhere_in_a_run_of_byte_tokens(
    prompt: list[list[int]], output: list[list[int]], data: st.DataObject
) -> None:
    ids = [SENTENCEPIECE.vocab["a"], *itertools.chain(*prompt)]
    num_whole = len(ids)
    ids += itertools.chain(*output)
    # The border lies anywhere inside the first word of the output.
    num_open = data.draw(st.integers(0, max(0, len(output[0]) - 1) if output else 0))
    border = num_whole + num_open
    whole = SENTENCEPIECE.decode(ids)
    given = run(Detokenizer(SENTENCEPIECE, ids[:border]), ids[border:])
    assert SENTENCEPIECE.decode(ids[:num_whole]) + "".join(given) == whole
    assert not any("�" in piece for piece in given)


def test_bytes_that_the_prompt_leaves_open_for_good_are_not_part_of_the_answer() -> None:
    the, face = SENTENCEPIECE.vocab["▁the"], SENTENCEPIECE.byte_ids("😀")
    for prompt in (
        [the, *face[:2]],
        [*face * 3, *face[:3]],
        [*face[1:] * 4],
        [SENTENCEPIECE.vocab["�"]],
    ):
        assert "".join(run(Detokenizer(SENTENCEPIECE, prompt), [the])) == " the"


def test_a_character_cut_off_by_the_end_leaves_the_ones_before_it_alone() -> None:
    face = SENTENCEPIECE.byte_ids("😀")
    assert run(Detokenizer(SENTENCEPIECE), [*face, *face[:2]]) == ["", "", "", "😀", "", "", "��"]


def test_a_word_after_the_prompt_keeps_its_space() -> None:
    the, world = SENTENCEPIECE.vocab["▁the"], SENTENCEPIECE.vocab["▁world"]
    assert Detokenizer(SENTENCEPIECE, [the]).push(world) == " world"
    assert Detokenizer(SENTENCEPIECE, []).push(world) == "world"


def test_a_character_begun_by_the_prompt_is_given_by_the_token_that_completes_it() -> None:
    decoder = ByteDecoder([b"x\xe4\xb8", b"\xad", b"y"])
    detokenizer = Detokenizer(decoder, [0])
    assert [detokenizer.push(1), detokenizer.push(2)] == ["中", "y"]


def test_text_before_a_split_character_is_not_held() -> None:
    decoder = ByteDecoder([b"hello \xf0", b"\x9f", b"\x98", b"\x80!"])
    assert run(Detokenizer(decoder), range(4)) == ["hello ", "", "", "😀!", ""]


def test_special_tokens_appear_only_when_asked() -> None:
    ids = [SENTENCEPIECE.vocab[word] for word in ("▁the", "<s>", "▁world")]
    assert "".join(run(Detokenizer(SENTENCEPIECE), ids)) == "the world"
    shown = "".join(run(Detokenizer(SENTENCEPIECE, skip_special_tokens=False), ids))
    assert "<s>" in shown


def test_a_long_run_of_tokens_without_text_keeps_the_window_small_and_the_spacing_right() -> None:
    the, start = SENTENCEPIECE.vocab["▁the"], SENTENCEPIECE.vocab["<s>"]
    ids = [the, *[start] * 100, SENTENCEPIECE.vocab["▁world"]]
    assert "".join(run(Detokenizer(SENTENCEPIECE), ids)) == "the world"


STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.text(alphabet="abc", max_size=30), STOPS, st.lists(st.integers(0, 30), max_size=30))
def test_text_is_cut_before_the_earliest_stop_string_however_it_arrives(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    given = "".join(matcher.push(piece.decode()) for piece in split_at(text.encode(), cuts))
    given += matcher.flush()
    starts = [text.find(stop) for stop in stops if stop in text]
    assert given == (text[: min(starts)] if starts else text)
    assert matcher.is_stopped == bool(starts)


@given(st.text(alphabet="abc", max_size=30), STOPS)
def test_only_a_proper_prefix_of_a_stop_string_is_held(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    given = ""
    for number, character in enumerate(text, start=1):
        given += matcher.push(character)
        if matcher.is_stopped:
            break
        held = text[len(given) : number]
        assert held == "" or any(stop.startswith(held) or stop in held for stop in stops)
        assert all(len(held) < len(stop) or stop not in given for stop in stops)


def test_a_complete_stop_string_waits_for_one_that_begins_earlier() -> None:
    matcher = StopMatcher(["abcd", "b"])
    assert (matcher.push("xab"), matcher.push("c"), matcher.is_stopped) == ("x", "", False)
    assert (matcher.push("d"), matcher.is_stopped) == ("", True)
    other = StopMatcher(["abcd", "b"])
    assert (other.push("xab"), other.push("z"), other.is_stopped) == ("x", "a", True)


def test_included_stop_string_stands_at_the_end() -> None:
    matcher = StopMatcher(["END"], is_included=True)
    assert (matcher.push("one E"), matcher.push("ND two")) == ("one ", "END")
    assert matcher.push("three") == ""


def test_skipped_text_is_never_matched() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.skip("ab") == "ab"
    assert (matcher.push("a"), matcher.skip("b"), matcher.is_stopped) == ("", "ab", False)


def test_an_empty_stop_string_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])
