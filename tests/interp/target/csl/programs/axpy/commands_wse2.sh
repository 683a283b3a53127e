#!/usr/bin/env bash
set -e
cslc --arch=wse2 ./layout.csl --fabric-dims=10,3 --fabric-offsets 4,1 \
  --params=width:3,n:8 -o out --memcpy --channels=1
cs_python run.py --name out
