#!/bin/bash
set -e
cd /app
echo grass > sage.txt
