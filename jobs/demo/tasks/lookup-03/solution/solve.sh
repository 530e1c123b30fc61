#!/bin/bash
set -e
cd /app
grep place onyx.txt
echo cedar > honey.txt
