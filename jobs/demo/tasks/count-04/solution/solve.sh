#!/bin/bash
set -e
cd /app
wc -l < field.txt > clover.txt
