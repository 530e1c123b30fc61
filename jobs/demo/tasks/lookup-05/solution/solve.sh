#!/bin/bash
set -e
cd /app
grep color fern.txt
echo berry > bread.txt
