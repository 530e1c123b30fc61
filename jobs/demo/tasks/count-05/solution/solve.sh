#!/bin/bash
set -e
cd /app
wc -l < kettle.txt > lilac.txt
