#!/bin/bash
set -e
cd /app
cat grape.txt
echo brick > linen.txt
