#!/bin/bash
set -e
cd /app
wc -l < arrow.txt > clover.txt
