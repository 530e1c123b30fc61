#!/bin/bash
set -e
cd /app
cat ivory.txt
mkdir sage
