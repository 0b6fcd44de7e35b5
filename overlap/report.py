"""placeholder"""
import dataclasses
@dataclasses.dataclass(frozen=True)
class Report:
    sites: tuple
    name: str = ""
