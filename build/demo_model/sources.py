"""What the demo model reads: named packages, the standard library modules held out, and accepted licences.

Data only. A package is fetched by name with pip; its licence is read from its own metadata at collection.
"""

from __future__ import annotations

# Held out whole: never trained on, and training files that mostly repeat them are dropped.
HELD_OUT_PACKAGES = ("httpx", "marshmallow", "tornado")
HELD_OUT_STDLIB = ("argparse.py", "configparser.py", "heapq.py", "statistics.py", "textwrap.py", "json/")

# Read from the running interpreter's environment, where they are installed anyway.
INSTALLED_PACKAGES = ("torch", "transformers", "triton")

PACKAGES = (
    "aiohttp",
    "apache-airflow-core",
    "apache-beam",
    "apache-superset",
    "astropy",
    "attrs",
    "black",
    "celery",
    "click",
    "dagster",
    "dask",
    "diffusers",
    "distributed",
    "django",
    "fastapi",
    "flask",
    "ipython",
    "jax",
    "jinja2",
    "keras",
    "matplotlib",
    "mitmproxy",
    "mlflow",
    "moto",
    "mypy",
    "networkx",
    "nltk",
    "nova",
    "numba",
    "numpy",
    "pandas",
    "pip",
    "prefect",
    "pydantic",
    "pyomo",
    "pytest",
    "qiskit",
    "ray",
    "requests",
    "rich",
    "scikit-learn",
    "scipy",
    "scrapy",
    "setuptools",
    "spacy",
    "sphinx",
    "sqlalchemy",
    "starlette",
    "statsmodels",
    "sympy",
    "textual",
    "trio",
    "twisted",
    "wagtail",
    "werkzeug",
    "xarray",
)

PERMISSIVE = (
    "MIT",
    "BSD",
    "Apache",
    "PSF",
    "Python Software Foundation",
    "ISC",
    "HPND",
    "0BSD",
    "Zlib",
    "CC0",
    "BSL-1.0",
)
RESTRICTED = ("GPL", "General Public", "MPL", "Mozilla", "SSPL", "BUSL", "Commercial", "Proprietary")

# Directories of somebody else's code (their licence is not the package's), and of data in Python clothing.
SKIPPED_DIRECTORIES = (
    "_vendor",
    "vendor",
    "_vendored",
    "vendored",
    "third_party",
    "thirdparty",
    "thirdparty_files",
    "extern",
    "externals",
    "_externals",
    "site-packages",
    "lib2to3",
    "encodings",
    "idlelib",
    "locale",
    "bad_coding",
    "typeshed",
)
