#!/bin/bash
set -e
cd /app
wc -l < pearl.txt > lemon.txt
