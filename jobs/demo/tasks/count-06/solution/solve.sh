#!/bin/bash
set -e
cd /app
wc -l < violet.txt > melon.txt
