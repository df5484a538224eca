#!/usr/bin/env bash
# Build the wheel and run the fast tests against it, with the source tree out of sight; then check what
# a bare install can do. Third-party packages are lent by .venv through a path file; its own editable
# install of batchyard is kept out by lending a folder of links that leaves it out.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -rf dist
.venv/bin/python -m build --no-isolation --wheel --outdir dist . >"$work/build.log" || { cat "$work/build.log"; exit 1; }
wheel=$(ls "$root"/dist/*.whl)

site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir "$work/lent"
for entry in "$site"/*; do
  case "$(basename "$entry")" in
    *batchyard*|__pycache__|pip|pip-*) ;;
    *) ln -s "$entry" "$work/lent/" ;;
  esac
done

.venv/bin/python -m venv "$work/full"
"$work/full/bin/python" -m pip install --quiet --no-deps --no-index "$wheel"
full_site=$("$work/full/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$work/lent" >"$full_site/lent.pth"

mkdir "$work/tree"
cp -r tests pyproject.toml README.md docs examples tools "$work/tree/"
cd "$work/tree"
"$work/full/bin/python" - "$work" <<'PY'
import sys, batchyard
assert batchyard.__file__.startswith(sys.argv[1]), f"the tests would not see the wheel: {batchyard.__file__}"
PY
# The object store that tests start is a program in .venv.
PATH="$PATH:$root/.venv/bin" "$work/full/bin/python" -m pytest -q -p no:cacheprovider -m "not model and not slow and not source"

"$root/.venv/bin/python" -m venv "$work/bare"
"$work/bare/bin/python" -m pip install --quiet --no-deps --no-index "$wheel"
"$work/bare/bin/python" -c 'import batchyard; print("A bare install imports batchyard", batchyard.__version__)'
if "$work/bare/bin/batchyard" --help 2>"$work/said"; then
  echo "A bare install has no command line, and says nothing of it."; exit 1
fi
grep -q "pip install 'batchyard\[local\]'" "$work/said"
echo "The wheel passes its tests, and a bare install says what to add."
