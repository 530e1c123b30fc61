#!/bin/bash
set -e
cd /app
wc -l < lilac.txt > sage.txt
