#!/bin/bash
set -e
cd /app
echo jade > opal.txt
