#!/bin/bash
set -e
cd /app
wc -l < tiger.txt > kettle.txt
