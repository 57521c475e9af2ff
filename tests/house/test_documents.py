"""The documents: named paths are there, every room is on the map, pages link to pages, README stays short."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurm_rlhf
from slurm_rlhf.config.keys import all_keys, documentation
from slurm_rlhf.config.text import default_text
from slurm_rlhf.docs.pages import TOPICS, page

ROOT = Path(slurm_rlhf.__file__).parents[1]
MAP = page("architecture").split("## Map of the repository")[1]
CONTRIBUTING = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "slurm_rlhf"


def paths(text: str) -> list[str]:
    """Find the paths that stand in backticks, without those that have a place for a name in them."""
    found = re.findall(r"`([^`\s]+)`", text)
    return [path for path in found if re.search(r"/|\.(py|toml|sh)$", path) and not re.search(r"[<>*()]|\.venv", path)]


@pytest.mark.parametrize("text", [MAP, CONTRIBUTING], ids=["map", "contributing"])
def test_named_paths_exist(text: str) -> None:
    assert len(paths(text)) > 10
    absent = [path for path in paths(text) if not (ROOT / path).exists()]
    assert [path for path in absent if not any(PACKAGE.rglob(path.rstrip("/")))] == []


RECIPES = {
    "an algorithm": (3, r"rloo|RLOO", {"family": "reinforce", "name": "rloo"}),
    "a configuration key": (2, r"logprob_chunk_tokens", {"room": "trainer", "file": "trainers"}),
    "a command": (2, r"status", {"name": "status"}),
    "a role": (5, r"[Cc]ritic|CRITIC", {"file": ""}),
    "a reward source": (3, r"RewardFunction|REWARD_SOURCES", {"name": "function"}),
    "an environment": (0, "", {}),  # a user's file
    "a backend of the weight transfer": (4, r"disk|Disk", {"name": "disk"}),
    "an engine": (3, r"\bhf\b|Hf", {"name": "hf"}),
    "a trainer": (3, r"PlainTrainer", {"name": "plain_torch"}),
}
"""Addition -> how many files it touches, a pattern that they hold for one that is there, its names in their paths."""


@pytest.mark.parametrize("added", RECIPES)
def test_a_recipe_lists_every_file_that_one_touches(added: str) -> None:
    """A recipe has no other numbered lines, and each of them begins with its file."""
    count, said, names = RECIPES[added]
    recipe = CONTRIBUTING.split(f"\n## Add {added}\n")[1].split("\n## ")[0]
    steps = re.findall(r"^\d+\. `([^`]+)`", recipe, re.MULTILINE)
    assert len(steps) == len(re.findall(r"^\d+\. ", recipe, re.MULTILINE)) == count
    for path in steps:
        place = re.sub(r"<(\w+)>", lambda found: names[found[1]] or "*", path)
        assert any(re.search(said, file.read_text(encoding="utf-8")) for file in ROOT.glob(place)), place


def test_recipes_are_all_there() -> None:
    assert re.findall(r"^## Add (.*)$", CONTRIBUTING, re.MULTILINE) == list(RECIPES)


def test_every_room_is_on_the_map() -> None:
    rooms = [path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("_")]
    assert [room for room in rooms if f"{room}/`" not in MAP] == []


# --- the pages --------------------------------------------------------------------------------------------------------

DOCS = PACKAGE / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_page_is_a_topic_and_every_topic_a_page() -> None:
    assert {path.stem for path in DOCS.glob("*.md")} == TOPICS.keys() - {"keys"}


@pytest.mark.parametrize("topic", TOPICS)
def test_a_page_opens_with_what_the_reader_gets(topic: str) -> None:
    title, opening = [line for line in page(topic).splitlines() if line][:2]
    assert title.startswith("# ")
    assert opening.startswith(("You ", "Your "))


def anchors(text: str) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda file: file.stem)
def test_links_lead_somewhere(file: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", file.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        other = file.parent / path if path else file
        assert other.exists(), target
        assert not anchor or anchor in anchors(other.read_text(encoding="utf-8")), target


def test_readme_is_short_and_names_every_page() -> None:
    assert len(README.splitlines()) <= 150
    assert [topic for topic in TOPICS if f"docs/{topic}.md" not in README and f"docs {topic}" not in README] == []
    assert "bash sbatch/quickstart.sh" in "\n".join(README.splitlines()[:20])


def test_the_reference_has_every_key_with_its_default() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `(.*?)` \| `(.*?)` \| (.+) \|$", page("keys"), re.MULTILINE)
    assert [name for name, *_ in rows] == list(all_keys())
    for name, _, default, text in rows:
        assert default == default_text(all_keys()[name])
        assert text.replace("\\|", "|") == " ".join(documentation()[name].split())


# --- words -----------------------------------------------------------------------------------------------------------

GLOSSARY = re.compile(
    r"\b(doors?|possession|casualt(y|ies)|heirs?|seats?|storms?|standing|hearing|desk|scene|beside|told)\b",
    re.IGNORECASE,
)
"""Words that a reader would have to look up here, or that stand for something else."""
SUFFIXES = {".py", ".md", ".toml", ".json", ".sh", ".js", ".html", ".def"}
ROOMS = [path for room in ("slurm_rlhf", "sbatch", "tests", ".github") for path in (ROOT / room).rglob("*")]
WRITTEN = [path for path in (ROOT / "README.md", ROOT / "pyproject.toml", *ROOMS) if path.suffix in SUFFIXES]


def test_the_product_its_pages_and_its_tests_use_the_words_of_the_field() -> None:
    assert len(WRITTEN) > 300
    texts = {path: f"{path.stem}\n{path.read_text('utf-8')}".replace("_", " ") for path in WRITTEN}
    del texts[Path(__file__)]
    assert [f"{path}: {found[0]}" for path, text in texts.items() for found in GLOSSARY.finditer(text)] == []


DANGLING = re.compile(r"""[#"']+\s*(of|that|what)\b""", re.IGNORECASE)
"""Beginnings of comments and docstrings that make sense only after the name that they are about."""


def remarks(text: str, suffix: str) -> Iterator[str]:
    """Yield the comments of a file, those of several lines by their first one, and docstrings behind a quote."""
    if suffix != ".py":
        yield from map(str.strip, re.findall(r"^[ \t]*#.*(?:\n[ \t]*#.*)*|[ \t]#.*", text, re.MULTILINE))
        return
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    alone = {row for row, token in found.items() if token.line.lstrip().startswith("#")}
    yield from (token.string for row, token in found.items() if not {row, row - 1} <= alone)
    values = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    yield from (f'"{value.value!s}' for value in values if isinstance(value, ast.Constant))


def test_comments_and_docstrings_make_sense_alone() -> None:
    texts = {path: path.read_text("utf-8") for path in WRITTEN if path.suffix in (".py", ".sh", ".toml", ".def")}
    suspects = [path for path, text in texts.items() if DANGLING.search(text)]  # to tokenize all takes long
    found = [(str(path), each) for path in suspects for each in remarks(texts[path], path.suffix)]
    assert [(path, each) for path, each in found if DANGLING.match(each)] == []
