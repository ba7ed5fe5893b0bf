"""The benchmark of grammars at its smallest; its figures are taken for nothing."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import grammar_peers, grammar_rules
from benchmarks.grammar import GRAMMARS, TAUGHT, main
from tests.worker.test_bench_peers import TINY
from worker.models import SHAPES


def test_every_grammar_is_measured_beside_the_same_batch_without(monkeypatch, capsys):
    monkeypatch.setitem(SHAPES, "S", dataclasses.replace(TINY, vocab_size=4096))
    main(["--shape", "S", "--streams", "2", "--output", "8", "--rounds", "2", "--threads", "1"])
    told = capsys.readouterr().out
    assert [line.split()[0] for line in told.splitlines()[1:]] == list(GRAMMARS)


def test_a_trained_model_is_measured_too_and_hardly_ever_refused_what_it_says(capsys):
    main(["--shape", "demo", "--streams", "2", "--output", "8", "--rounds", "1", "--threads", "1"])
    told = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in told] == list(TAUGHT)
    assert all(float(line.split()[-1]) < 0.1 for line in told)


def test_what_makes_masks_is_measured_by_itself(capsys):
    grammar_peers.main(["--tokens", "4096", "--answers", "1", "--output", "8", "--makers", "llguidance"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["schema", "json", "regex"]


def test_a_stream_is_measured_beside_rules_that_nobody_can_follow_and_a_schema_that_takes_long(monkeypatch, capsys):
    monkeypatch.setitem(SHAPES, "S", dataclasses.replace(TINY, vocab_size=4096))
    grammar_rules.main(["--rules", "40", "--lists", "24", "--patterns", "^a{3}", "--tokens", "40", "--threads", "1"])
    alone, *beside = capsys.readouterr().out.splitlines()
    assert float(alone.split()[1]) > 0
    assert "its grammar cannot be followed any further" in beside[0]
    assert [line.split(":")[0] for line in beside] == ["40 rules", "24 lists", "^a{3}"]


def test_a_grammar_that_is_not_known_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--grammars", "none"])
    assert "invalid choice" in capsys.readouterr().err
