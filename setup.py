"""Packages and package data; everything else stands in pyproject.toml.

Configs and cards go into the package `pipeline`: as a package of its own, the folder `datasets`
would shadow that of Hugging Face.
"""

from pathlib import Path

from setuptools import find_packages, setup

# An image installs the requirements before it has the code.
DATA = {
    package: folder
    for package, folder in {"pipeline.configs": "configs", "pipeline.cards": "datasets"}.items()
    if Path(folder).is_dir()
}

setup(
    packages=[*find_packages(include=["pipeline*", "workers*"]), *DATA],
    package_dir=DATA,
    package_data={
        "": ["*.css", "*.html"],
        "pipeline.launch": ["templates/*"],
        **{package: ["**/*"] for package in DATA},
    },
)
