#!/bin/bash
set -e
cd /app
wc -l < eagle.txt > brook.txt
