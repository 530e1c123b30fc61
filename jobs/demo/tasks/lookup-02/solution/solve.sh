#!/bin/bash
set -e
cd /app
grep size cloud.txt
echo lilac > poppy.txt
