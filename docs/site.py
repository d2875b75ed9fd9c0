"""Hooks of the site (mkdocs.yml): files of deploy/ that pages link to become files of the site.

In the repository a page links to ../deploy/NAME; the site has the same file at deploy/NAME.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

DEPLOY = Path(__file__).parents[1] / "deploy"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in sorted(DEPLOY.rglob("*")):
        if path.is_file():
            name = f"deploy/{path.relative_to(DEPLOY)}"
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    return markdown.replace("](../deploy/", "](deploy/")
