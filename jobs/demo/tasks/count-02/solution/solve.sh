#!/bin/bash
set -e
cd /app
wc -l < meadow.txt > walnut.txt
