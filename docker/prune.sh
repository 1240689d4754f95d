#!/bin/sh
# Remove what nothing imports from an environment: a quarter of the light image.
set -eu
packages=$(echo "$1"/lib/python3.*/site-packages)

find "$packages" -type d -name tests -prune -exec rm -r {} +
# Files for compilers, and the sources that Transformers generates its models from.
find "$packages" -type f \( -name '*.[ach]' -o -name '*.hpp' -o -name '*.py[ix]' -o -name '*.px[di]' \
  -o -name 'modular_*.py' \) -delete
# The bridge to PyPy, and Arrow's network protocol.
rm "$packages"/zstandard/_cffi* "$packages"/pyarrow/*flight*
# Pillow's fonts and AVIF, a format that the product does not read.
rm "$packages"/PIL/_imagingft.* "$packages"/PIL/_avif.* \
  "$packages"/pillow.libs/libavif-* "$packages"/pillow.libs/libfreetype-* "$packages"/pillow.libs/libharfbuzz-*
# One library has three names; the loader asks only for libNAME.so.VERSION.
find "$packages/pyarrow" -name 'libarrow_python*.so' -delete
find "$packages/pyarrow" -name 'libarrow_python*.so.*.*' -delete
# From AWS, keep S3 itself and the services that its credentials can come from.
find "$packages/botocore/data" -mindepth 1 -maxdepth 1 -type d \
  ! -name s3 ! -name sts ! -name sso ! -name sso-oidc ! -name signin -exec rm -r {} +
