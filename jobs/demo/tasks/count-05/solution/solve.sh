#!/bin/bash
set -e
cd /app
wc -l < poppy.txt > willow.txt
