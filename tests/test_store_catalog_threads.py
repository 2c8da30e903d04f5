"""A catalog that one thread reads is whole for the others, and a copy that is not known yet is asked for once more."""

import threading
from pathlib import Path
from typing import Any

import pytest

from numem.store.catalog.catalog import Catalog
from numem.store.catalog.facts import State
from numem.store.memory import Memory
from tests.store_fixtures import make_chain, put


def test_a_refresh_waits_for_one_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread that asks whether everything is known must not be told so while it is being taken up."""
    (first, second) = make_chain(2)
    with Memory(tmp_path / "home") as writer, Memory(tmp_path / "home") as reader:
        put(writer, [first])
        catalog = reader._parts.catalog
        assert catalog.placements.current(first[0].pieces[0])
        put(writer, [second])
        reading, go_on = threading.Event(), threading.Event()
        take_up = Catalog._take_up

        def slowly(self: Catalog, *args: Any) -> None:
            reading.set()
            assert go_on.wait(60)
            take_up(self, *args)

        monkeypatch.setattr(Catalog, "_take_up", slowly)
        slow = threading.Thread(target=catalog.refresh, args=("placements",))
        slow.start()
        assert reading.wait(60)
        found: list[bool] = []

        def look() -> None:
            catalog.refresh("placements", force=True)
            found.append(bool(catalog.placements.current(second[0].pieces[0])))

        other = threading.Thread(target=look)
        other.start()
        other.join(0.3)
        assert not found
        go_on.set()
        slow.join(60)
        other.join(60)
        assert found == [True]


def test_a_promotion_asks_again_before_it_says_that_there_is_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, second) = make_chain(2)
    with Memory(tmp_path / "home") as writer, Memory(tmp_path / "home") as reader:
        put(writer, [first])
        assert reader.get(first[0].id) is not None
        put(writer, [second])
        refresh, asked = Catalog.refresh, []

        def late(self: Catalog, *names: str, force: bool = False) -> None:
            """What a refresh finds that is not forced may be old."""
            asked.append(force)
            if force or names == ("nodes",) or "placements" not in names:
                refresh(self, *names, force=force)
            else:
                refresh(self, *(name for name in names if name != "placements"))

        monkeypatch.setattr(Catalog, "refresh", late)
        report = reader.promote([second[0].id])
        assert not report.failed and report.promoted == 1 and True in asked
        assert any(p.tier == "ssd" and p.state is State.READY for p in reader.placements(second[0].pieces[0]))
