"""What an entry takes besides its arguments: memory of the launch, a parameter for each kind that it uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tessera.codegen.ptx.text import Text

# In the order of parameters: what assertions find, and beside which values; what is printed; where programs meet.
KINDS = ("reports", "values", "prints", "meeting")


class Extras:
    """The kinds that an entry under emission uses: the address of each, and the places of the text that use it."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._registers: dict[str, str] = {}
        self.sites: dict[str, list[dict[str, Any]]] = {}

    def site(self, kind: str, described: Mapping[str, Any]) -> tuple[int, str]:
        """A new place of the text that uses a kind: its number, and the register with the memory's address."""
        places = self.sites.setdefault(kind, [])
        places.append(dict(described))
        return len(places) - 1, self.address(kind)

    def address(self, kind: str) -> str:
        """The register with the address of a kind's memory."""
        if kind not in self._registers:
            self._registers[kind] = self._text.new("b64")
        return self._registers[kind]

    @property
    def used(self) -> tuple[str, ...]:
        """The kinds, in the order of their parameters."""
        return tuple(kind for kind in KINDS if kind in self._registers)

    def params(self, name: str) -> list[str]:
        """The parameters' declarations."""
        return [f"\t.param .u64 {name}_{kind}" for kind in self.used]

    def lines(self, name: str) -> Iterator[str]:
        """What stands at the begin of the entry."""
        for kind in self.used:
            register = self._registers[kind]
            yield f"\tld.param.u64 {register}, [{name}_{kind}];"
            yield f"\tcvta.to.global.u64 {register}, {register};"

    def described(self) -> dict[str, Any]:
        """The places as data that JSON can hold."""
        return {kind: self.sites[kind] for kind in self.used}
