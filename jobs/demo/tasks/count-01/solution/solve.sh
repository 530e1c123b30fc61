#!/bin/bash
set -e
cd /app
wc -l < river.txt > moon.txt
